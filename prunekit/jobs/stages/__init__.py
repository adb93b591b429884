"""The stages of a job, in a file each, and exports that are checked, scored and timed."""
