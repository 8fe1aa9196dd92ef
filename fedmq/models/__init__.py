"""The trainable models over frozen encoders."""
