"""What can be asked for: the settings of a job and of all its parts, as frozen dataclasses.

The constraints in their annotations are what `prunekit.recipe` checks. Nothing here imports torch: a recipe is read and
checked in a fraction of a second.
"""
