"""Pages of a report, in a file each."""
