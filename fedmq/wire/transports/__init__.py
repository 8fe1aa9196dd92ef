"""Transports: one module per URI scheme; their interface is in ``base``, their registry in ``registry``."""
