"""Exports of models: checked against the model, scored, timed, and only then given their names."""
