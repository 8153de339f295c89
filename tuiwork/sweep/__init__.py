"""Sweeps: many runs of a matrix of settings, and the report about them."""
