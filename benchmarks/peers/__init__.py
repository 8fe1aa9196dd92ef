"""The same work in other systems, each in an environment of its own, and the ratio to fedmq in one run."""
