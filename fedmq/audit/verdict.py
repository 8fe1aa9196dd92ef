"""The sentences that end an audit: what does not hold, what holds, and what is not proven."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedmq.audit.log_checks import Audit
from fedmq.text import counted, enumerated, first_few, printable
from fedmq.wire.messages import COORDINATOR

#: Names that a sentence lists before it counts the rest.
_SHOWN = 4


@dataclass(frozen=True)
class Evidence:
    """Evidence that an auditor has in addition to the run folder.

    Args:
        keys: folder of the processes' public keys; None without one.
        former: processes that signed with keys which have since been replaced or removed.
        heads: heads noted before, with which the logs agree.
        stamped: time and authority of a verified time stamp of these heads; None without one.
    """

    keys: Path | None = None
    heads: bool = False
    stamped: str | None = None
    former: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What an audit shows, in one sentence each.

    Args:
        holds: what holds.
        not_proven: what is not proven.
        fails: what does not hold; empty without contradictions.
        incomplete: which logs are missing and where they are; empty if they are all there, or others contradict.
    """

    holds: str
    not_proven: str
    fails: str = ""
    incomplete: str = ""


def verdict(audit: Audit, evidence: Evidence) -> Verdict:
    """The sentences about an audit."""
    if audit.incomplete:
        return _of_missing_logs(audit)
    if audit.findings:
        return _of_findings(audit)
    agree = f"What holds: {_agreement(audit)} with {_files(audit)}"
    if not any(log.starts for log in audit.signatures.values()):
        noted = ", and with the heads noted before" if evidence.heads else ""
        changed = "that no holder of all these logs changed them" + (
            " before the heads were noted" if evidence.heads else ""
        )
        why = "as they are not signed (an earlier fedmq wrote them, or their signatures were removed)"
        return Verdict(f"{agree}{noted}.", f"Not proven: {changed}, {why}; {_uncovered(audit)}.")
    stamp = f", which was before {evidence.stamped}" if evidence.stamped else ""
    since = f" The heads are the noted ones: nothing was changed since the heads were noted{stamp}."
    but = ", except for the last records of each log" if audit.ends else ""
    signed = "Each log is signed by its process and anchored in the logs of its peers, so that a change takes the "
    signed += f"keys of all {len(audit.records)} processes{but}"
    if len(audit.records) == 1:
        signed = "The log is signed by its process"
    holds = f"{agree}. {signed}.{since if evidence.heads else ''}"
    return Verdict(holds, f"Not proven: {'; '.join(_doubts(audit, evidence))}.")


def outcome(audit: Audit) -> str:
    """What an audit found, in a few words."""
    if audit.incomplete:
        return f"{counted(len(audit.absent), 'missing log')}, no contradiction"
    if audit.findings:
        return counted(len(audit.findings), "difference")
    return "the logs are consistent" if len(audit.records) > 1 else "the log is consistent"


def _agreement(audit: Audit) -> str:
    one = len(audit.records) == 1
    return "the log agrees" if one else f"the {len(audit.records)} logs agree with each other and"


def _inside(audit: Audit) -> str:
    """What holds of logs that nothing of the coordinator can be compared with."""
    signed = any(log.starts for log in audit.signatures.values())
    which = "log" if len(audit.records) == 1 else f"{len(audit.records)} logs"
    return f"the hashes{' and signatures' if signed else ''} of the {which} are valid"


def _of_missing_logs(audit: Audit) -> Verdict:
    """The sentences about an audit that found nothing but that logs are missing."""
    names = _listed(audit.absent)
    logs = "its log is" if len(audit.absent) == 1 else "their logs are"
    alone = COORDINATOR in audit.absent
    return Verdict(
        f"What holds: {_inside(audit) if alone else f'{_agreement(audit)} with {_files(audit)}'}.",
        f"Not proven: what {names} sent and received, as {logs} not in this folder.",
        incomplete=(
            f"Incomplete: nothing contradicts, but {counted(len(audit.absent), 'log')} could not be checked. Copy "
            f"messages/NAME.jsonl of {names} from the run folders on their machines into messages/ of this one, "
            "and audit again."
        ),
    )


def _of_findings(audit: Audit) -> Verdict:
    """The sentences about an audit with findings."""
    places = [each.place.split("/")[-1] for each in audit.findings]
    mentioned = {name for name in audit.records if any(f"{name}.jsonl" in place for place in places)}
    mentioned |= {each.lost for each in audit.findings}
    clean = sorted(audit.records.keys() - mentioned)
    if not clean:
        holds = "none of the logs is free of differences"
    elif len(clean) == len(audit.records):
        holds = (
            f"no difference was found inside the log of {_listed(clean)}; only other files differ from it"
            if len(clean) == 1
            else f"the {len(clean)} logs agree with each other; only other files differ from them"
        )
    else:
        holds = f"no difference was found in the {'log' if len(clean) == 1 else 'logs'} of {_listed(clean)}"
    return Verdict(
        f"What holds: {holds}.",
        "Not proven: what was sent and what was computed wherever they differ.",
        f"What does not hold: the logs and files contradict each other ({counted(len(audit.findings), 'difference')}).",
    )


def _listed(names: list[str]) -> str:
    shown = [*map(printable, names)]
    return first_few(shown, _SHOWN) if len(shown) > _SHOWN else enumerated(shown)


def _files(audit: Audit) -> str:
    """The files of the run folder that were checked against the logs."""
    if audit.compared:
        return f"{', '.join(audit.compared)}"
    return "the figures of the run folder that they record: model digest, metrics, traffic and merges"


def _uncovered(audit: Audit) -> str:
    """What no log records."""
    if not audit.compared:
        return "real times, memory and losses"
    return "real times and memory in summary.json, and report.html, status.json and checkpoints/"


def _doubts(audit: Audit, evidence: Evidence) -> Iterator[str]:
    """What signed logs without findings do not prove."""
    before = " before the heads were noted" if evidence.heads else ""
    yield f"that the holders of all keys did not collude to write false logs{before}"
    if audit.ends:
        named = _listed([f"{count} of {name}" for name, count in audit.ends.items()])
        yield f"that no signer changed the last records of its log ({named}), for which fewer keys are enough"
    if evidence.keys is None:
        yield "whose keys these are (compare fingerprints, or give --keys DIR)"
    elif audit.keyless:
        yield _keyless(audit, evidence.keys)
    if evidence.former:
        yield f"that no one else held the keys of {_listed(list(evidence.former))} that were replaced or removed"
    yield f"the {_uncovered(audit)}, which no signature covers"
    if evidence.stamped is None:
        yield "when it happened, without an external time stamp"
    if not audit.finished:
        yield "that the run did not continue, as it has no summary"
    unsigned = {process: log.unsigned for process, log in audit.signatures.items() if log.unsigned}
    if unsigned:
        total, names = sum(unsigned.values()), sorted(unsigned)
        yield f"the last {counted(total, 'record')} of {_listed(names)}, which are not signed"


def _keyless(audit: Audit, keys: Path) -> str:
    """Whose keys the auditor lacks, and the command that adds the first of them."""
    first = audit.keyless[0]
    request = keys / f"{first}.request"
    file = request if request.is_file() else f"{first}.request"
    log, of = ("log", first) if len(audit.keyless) == 1 else ("logs", "them")
    signed = f"who signed the {log} of {_listed(list(audit.keyless))}"
    return printable(f"{signed}: no public key of {of} is in {keys} (`fedmq keys accept {keys} {file}` adds it)")
