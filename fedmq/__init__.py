"""fedmq: message-queue based asynchronous cross-silo federated learning of cross-modal retrieval models."""

__version__ = "0.1.0"
