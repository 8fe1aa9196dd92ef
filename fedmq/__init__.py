"""fedmq: message-queue based, asynchronous, cross-silo federated cross-modal retrieval."""

__version__ = "0.1.0"
