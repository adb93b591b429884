"""Measurements: accuracy, size, latency, and the proof that the compact model equals the masked one."""
