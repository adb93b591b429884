"""Latency of models beside each other: timed alternately, in a process for each runtime."""
