"""Measured records: the benchmark directory, its index, and the watch on it."""
