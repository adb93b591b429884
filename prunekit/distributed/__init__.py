"""Several processes, one job: who is here, what they tell each other, and how they fail together.

Without a process group every function is that of a group of one. Nothing is imported here, so that the command line can
look at the environment without torch: see
`launch`, `joining`, `group`, `exchange` and `failing`.
"""
