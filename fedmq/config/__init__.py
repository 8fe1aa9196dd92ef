"""Scenarios: schema, files, faults, registries, and the id of a run."""
