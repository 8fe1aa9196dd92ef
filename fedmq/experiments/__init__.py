"""Comparisons and sweeps of many runs."""
