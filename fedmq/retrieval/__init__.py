"""Search and plots with released models."""
