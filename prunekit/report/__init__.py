"""Reports: from the folder of a run to self-contained HTML pages."""
