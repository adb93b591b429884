"""Examples of tasks, in a file each: a model, data and a task, to run as they are and to begin one's own with."""
