"""Hooks of every kind behind one owner: registered on enter, removed on exit, also on an error."""
