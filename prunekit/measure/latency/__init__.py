"""Latency of several models: timed alternately, in a process for each runtime."""
