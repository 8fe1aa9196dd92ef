"""The file descriptors that a run's processes need, and the limit on them."""

from __future__ import annotations

import resource

from fedmq.errors import InputError

#: File descriptors of any process of a run: its imports, locks, sockets and ZeroMQ's threads.
OTHER_DESCRIPTORS = 64
#: File descriptors for connections over TCP that are not admitted yet.
_UNADMITTED = 32


def allow_descriptors(connections: int, bind: str) -> None:
    """Raise this process's limit of open files to the system's maximum, as each connection takes one.

    Args:
        connections: number of connections that the coordinator expects.
        bind: URI on which it listens.

    Raises:
        InputError: the maximum is too low for the connections.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = connections + OTHER_DESCRIPTORS + (_UNADMITTED if bind.startswith("tcp:") else 0)
    if most != resource.RLIM_INFINITY and most < needed:
        allowed = f"at least {needed} for {connections} connections: raise `ulimit -Hn`, or LimitNOFILE= of systemd"
        raise InputError("open files of this process (ulimit -Hn)", most, allowed)
