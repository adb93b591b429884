"""Figures of the pages: SVG elements that stand on their own, and images with the boxes of detections."""
