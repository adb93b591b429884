"""Figures of the pages, each as an SVG element that stands on its own."""
