"""The version of fedmq."""

__version__ = "0.1.0"
