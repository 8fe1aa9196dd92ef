"""Transports by URI scheme."""
