"""Hooks of every kind behind one owner, removed also on an error; and copies of models, whose hooks act on the copy."""
