"""The two sentences that end an audit: what holds, and what is not proven."""

from __future__ import annotations

from dataclasses import dataclass

from fedmq.audit.log_checks import Audit


@dataclass(frozen=True)
class Evidence:
    """Evidence that an auditor has in addition to the run folder.

    Args:
        keys: the processes' public keys.
        former: processes that signed with keys which have since been replaced or removed.
        heads: heads noted before, with which the logs agree.
        stamped: time and authority of a verified time stamp of these heads; None without one.
    """

    keys: bool = False
    heads: bool = False
    stamped: str | None = None
    former: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What an audit shows.

    Args:
        holds: what holds, in one sentence.
        not_proven: what is not proven, in one sentence.
    """

    holds: str
    not_proven: str


def verdict(audit: Audit, evidence: Evidence) -> Verdict:
    """The two sentences about an audit."""
    count = len(audit.records)
    if audit.findings:
        return Verdict(
            f"What holds: these logs and files do not belong together as they are ({_number(audit.findings)} above).",
            "Not proven: what was sent and what was computed wherever they differ.",
        )
    agree = f"What holds: the {count} logs agree with each other and with the run folder"
    if not any(log.starts for log in audit.signatures.values()):
        noted = " and with the heads noted before" if evidence.heads else ""
        return Verdict(
            f"{agree}{noted}.",
            "Not proven: that no holder of all these logs changed them"
            + (" before the heads were noted" if evidence.heads else "")
            + ", as they are not signed (an earlier fedmq wrote them, or their signatures were removed).",
        )
    since = " and that nothing was changed since the heads were noted" if evidence.heads else ""
    stamp = f", which was before {evidence.stamped}" if evidence.stamped else ""
    holds = (
        f"{agree}, each is signed by its process and anchored in the logs of its peers, so that a change needed the "
        f"keys of all {count} processes{since}{stamp}."
    )
    return Verdict(holds, f"Not proven: {'; '.join(_doubts(audit, evidence))}.")


def _number(findings: list[object] | object) -> str:
    count = len(findings) if isinstance(findings, list) else 0
    return f"{count} difference" if count == 1 else f"{count} differences"


def _doubts(audit: Audit, evidence: Evidence) -> list[str]:
    """What signed logs without findings do not prove."""
    collude = "that the holders of all keys did not collude to write false logs"
    doubts = [collude + (" before the heads were noted" if evidence.heads else "")]
    if not evidence.keys:
        doubts.append("whose keys these are (compare fingerprints, or give --keys DIR)")
    if evidence.former:
        shown = ", ".join(evidence.former[:3]) + (" and others" if len(evidence.former) > 3 else "")
        doubts.append(f"that no one else held the keys of {shown} that were replaced or removed")
    if evidence.stamped is None:
        doubts.append("when it happened, without an external time stamp")
    if not audit.finished:
        doubts.append("that the run did not continue, as it has no summary")
    unsigned = {process: log.unsigned for process, log in audit.signatures.items() if log.unsigned}
    if unsigned:
        total, names = sum(unsigned.values()), sorted(unsigned)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        doubts.append(f"the last {total} records of {shown}, which are not signed")
    return doubts
