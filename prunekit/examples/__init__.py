"""Examples of tasks, in a file each: a model, data and a task, to copy and to run with `python:prunekit.examples...`."""
