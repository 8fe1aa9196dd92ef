"""The Python interface: ``fedmq.run``, ``fedmq.compare``, ``fedmq.open_run`` and ``fedmq.load``."""
