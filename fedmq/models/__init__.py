"""Trainable models on top of frozen encoders."""
