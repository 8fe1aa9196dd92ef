"""Transports by URI scheme: one file a scheme, behind the interface of ``base`` and the registry of ``registry``."""
