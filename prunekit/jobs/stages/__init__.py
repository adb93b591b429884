"""The stages of a job, in a file each."""
