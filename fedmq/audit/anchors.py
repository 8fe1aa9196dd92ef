"""How far each log is anchored in all others, so that a change needs the keys of all processes.

A message carries the head of its sender's log to its receiver, whose next signature covers it. Only the records before
such a head are anchored: those after a process's last message are covered by its own signature alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedmq.audit.signature_checks import SignedLog
from fedmq.wire.log_records import MessageRecord
from fedmq.wire.messages import COORDINATOR


def ends_to_change(logs: Mapping[str, SignedLog], received: Iterable[MessageRecord]) -> dict[str, int]:
    """Number of last records that could be changed without the keys of all processes, of each log that has some.

    A record of the coordinator is anchored in the logs of all peers that received a later head; a record of another
    process in the coordinator's log, and through it in the logs of all other peers.

    Args:
        logs: the signatures of each log.
        received: messages as their receivers logged them.
    """
    if COORDINATOR not in logs:
        return {name: log.records for name, log in sorted(logs.items())}
    known = dict.fromkeys(logs.keys() - {COORDINATOR}, 0)  # records of the coordinator before a head
    heads: dict[str, list[tuple[int, int]]] = {name: [] for name in known}
    for record in received:
        sender, receiver = record.header.sender, record.header.receiver
        place = logs[sender].hashes.get(record.head or "") if sender in logs else None
        if place is None or receiver not in logs or record.n >= logs[receiver].signed:
            continue
        if sender == COORDINATOR:
            known[receiver] = max(known[receiver], place + 1)
        elif receiver == COORDINATOR:
            heads[sender].append((place + 1, record.n))
    anchored = {COORDINATOR: min(known.values(), default=0)}
    for name, held in heads.items():
        others = min((count for other, count in known.items() if other != name), default=logs[COORDINATOR].records)
        anchored[name] = max((count for count, n in held if n < others), default=0)
    ends = {name: log.records - anchored[name] for name, log in sorted(logs.items())}
    return {name: count for name, count in ends.items() if count}
