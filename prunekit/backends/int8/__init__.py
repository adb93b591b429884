"""Quantization of exported files to int8: calibrated, checked, and limited by what it costs."""
