"""Sections of a run's page, by name."""
