"""Benchmarks: not tests. See README.md."""
