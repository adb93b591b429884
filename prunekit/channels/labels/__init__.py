"""Channel labels: integers for what must be kept or removed together, merged by union-find; label 0 is locked."""

# The documented path of what rules for operators of one's own need.
from prunekit.channels.labels.label_flow import Field as Field
from prunekit.channels.labels.label_flow import along as along
