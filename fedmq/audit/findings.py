"""What an audit finds: each finding has a cause, a place and a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from fedmq.errors import InputError


class Cause(StrEnum):
    """What a finding contradicts."""

    CHAIN = "chain"  # a log's own order: a record was changed, removed, inserted or moved, or is none
    SESSION = "session"  # the counters of a session
    ENDS = "ends"  # the record of the same message at its other end
    NOT_SENT = "not_sent"  # the log of the sender, which lacks the message
    NO_LOG = "no_log"  # nothing: the log of a process that took part is not there, and could not be checked
    SENDER = "sender"  # who may write, send or receive what
    SIGNATURE = "signature"  # what a process signed, or had to sign
    KEY = "key"  # the keys that its peers accept, or the auditor has
    DECLARED = "declared"  # what the processes declared at their starts, or the run that they named
    RELEASE = "release"  # the coordinator's note of what it released
    RESULT = "result"  # the metrics and the summary, or what they are computed from
    FILE = "file"  # the format of a file, or its digest at the end of the run
    NOTED = "noted"  # heads that were noted before
    POLICY = "policy"  # the auditor's policy


@dataclass(frozen=True)
class Finding:
    """One discrepancy that the audit found."""

    cause: Cause  # what it contradicts
    place: str  # file and line
    what: str  # the discrepancy, in one line
    # The process whose log is missing, or lacks a message that another one has; empty for other causes.
    process: str = ""

    def to_plain(self) -> dict[str, str]:
        """As JSON-serialisable data."""
        return {"cause": self.cause, "place": self.place, "what": self.what}


#: Causes that explain others, which come after them here or are not listed.
_GRAVEST = (
    Cause.SENDER,
    Cause.NO_LOG,
    Cause.CHAIN,
    Cause.SIGNATURE,
    Cause.KEY,
    Cause.NOTED,
    Cause.DECLARED,
    Cause.SESSION,
)
#: What a coordinator's log that is cut or changed no longer supports.
_RESTS_ON_THE_COORDINATOR = (Cause.RELEASE, Cause.RESULT)


def by_cause(findings: Sequence[Finding]) -> list[tuple[Finding, str]]:
    """One finding for each log or file that differs, the one that explains most, and how many more there are.

    What differs because the coordinator's log is cut or changed counts with that log.
    """
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        file = finding.place.rsplit("/", 1)[-1].partition(":")[0].removesuffix(".jsonl")
        groups.setdefault(finding.process or file, []).append(finding)
    damaged_log = groups.get("coordinator", [])
    if any(finding.cause in (Cause.CHAIN, Cause.SIGNATURE, Cause.NOT_SENT) for finding in damaged_log):
        for name in [name for name in groups if name != "coordinator"]:
            damaged_log += [finding for finding in groups[name] if finding.cause in _RESTS_ON_THE_COORDINATOR]
            groups[name] = [finding for finding in groups[name] if finding.cause not in _RESTS_ON_THE_COORDINATOR]
    lines = list[tuple[Finding, str]]()
    for name, group in groups.items():
        if not group:
            continue
        first = min(group, key=lambda finding: (*_GRAVEST, finding.cause).index(finding.cause))
        others = Counter(finding.cause for finding in group if finding is not first)
        kinds = ", ".join(f"{count:,} {cause}" for cause, count in others.most_common())
        lines.append((first, f"; {others.total():,} more that {name} explains or contains ({kinds})" if others else ""))
    return lines


#: A finding about metrics or the summary, by place and text.
wrong_result = partial(Finding, Cause.RESULT)


def damaged(error: InputError) -> Finding:
    """The finding of a file that cannot be read."""
    return Finding(Cause.FILE, error.place, f"{error.found} instead of {error.allowed}")
