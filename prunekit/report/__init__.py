"""A run, a sensitivity analysis, a latency profile, or a comparison of runs as one self-contained HTML page."""
