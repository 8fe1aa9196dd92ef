"""Check a run's messages against a policy: an auditor's rules for what may pass between silos and coordinator.

Rules limit what the logs record of every sealed message: sender and receiver, payload kinds, bytes of the payloads'
tensors, and bytes of all its frames. The rest of a payload (numbers, names, text) counts in the frames' bytes. A silo
may apply its own policy before a message is sealed: it does not send what the policy forbids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from rich.console import Console
from rich.markup import escape

from fedmq.audit.findings import Cause, Finding
from fedmq.audit.log_checks import Audit
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Name, Part
from fedmq.config.yaml_files import read_yaml, validated
from fedmq.errors import InputError
from fedmq.text import printable
from fedmq.wire.log_records import Frame, MessageRecord, read_log
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind, Message
from fedmq.wire.payloads import (
    PAYLOADS,
    DataFormat,
    DataStatement,
    Payload,
    Refusal,
    SiloMetrics,
    SiloModalities,
    WithheldBy,
    tensor_bytes,
)

Way = Literal["up", "down"]
_SHOWN = 20  # findings printed; the JSON has all


def _known(kind: str) -> str:
    if kind not in PAYLOADS:
        raise ValueError(f"one of {', '.join(sorted(PAYLOADS))}")
    return kind


_Kind = Annotated[str, AfterValidator(_known)]
_Bytes = Annotated[int, Field(strict=True, ge=0)]


class Rule(Part):
    """Limits of the messages that a silo sends, or receives; a key that is left out or null limits nothing."""

    kinds: list[_Kind] | None = Field(None, description="payload kinds that may pass")
    fields: dict[_Kind, list[str]] | None = Field(
        None,
        description="fields that may have a value, by payload kind; only a silo can check it, before it sends",
    )
    bytes_per_payload: dict[_Kind, _Bytes] | None = Field(
        None, description="largest size of a payload's tensors, by payload kind"
    )
    bytes_per_message: _Bytes | None = Field(None, description="largest message: the size of all its frames, as sealed")
    bytes_per_message_with: dict[_Kind, _Bytes] | None = Field(
        None,
        description="replaces bytes_per_message for messages with a payload of a kind; of several the largest applies",
    )
    bytes_in_all: _Bytes | None = Field(
        None, description="largest total size over the run of one silo's messages that have payloads, refusals aside"
    )

    @model_validator(mode="after")
    def _fields_exist(self) -> Rule:
        for kind, names in (self.fields or {}).items():
            declared = PAYLOADS[kind].FIELDS
            if unknown := [name for name in names if name not in declared]:
                raise ValueError(f"{kind} has no field {unknown[0]}, only {', '.join(declared)}")
        return self


class Ways(Part):
    """Rules for what a process sends (``up``) and receives (``down``)."""

    up: Rule = Rule()
    down: Rule = Rule()


class Policy(Ways):
    """A policy: one rule per direction for all silos, and exceptions for single silos.

    Args:
        up: what each silo may send.
        down: what each silo may receive.
    """

    evaluator: Ways = Ways()  # what the evaluator may send and receive; ``up`` and ``down`` do not apply to it
    # Exceptions by silo name; a key given here replaces that key of ``up`` or ``down``, the others stay.
    silos: dict[Name, Ways] = Field(default_factory=dict)
    peers: list[Name] | None = None  # the processes that may send or receive messages at all; None allows every process

    def rule(self, process: str, way: Way) -> tuple[Rule, dict[str, str]]:
        """The rule of a process for one direction, and for each of its keys the place in the policy file."""
        if process == EVALUATOR:
            return getattr(self.evaluator, way), {key: f"evaluator.{way}.{key}" for key in Rule.model_fields}
        general: Rule = getattr(self, way)
        exception: Rule = getattr(self.silos.get(process, Ways()), way)
        given = exception.model_fields_set
        places = {key: f"silos.{process}.{way}.{key}" if key in given else f"{way}.{key}" for key in Rule.model_fields}
        return general.model_copy(update={key: getattr(exception, key) for key in given}), places


def read_policy(path: Path) -> Policy:
    """Read a policy.

    Raises:
        InputError: it cannot be read, a key or value is not allowed, or it limits nothing.
    """
    raw = read_yaml(path, "a policy")
    policy = validated(Policy, raw, path)
    strange = sorted({COORDINATOR, EVALUATOR} & set(policy.silos))
    if strange:
        raise InputError(f"{path}: silos", strange[0], "names of silos; the evaluator has its own key")
    every = [
        getattr(ways, way) for ways in (policy, policy.evaluator, *policy.silos.values()) for way in ("up", "down")
    ]
    if policy.peers is None and all(rule == Rule() for rule in every):
        raise InputError(str(path), "a policy that limits nothing", f"at least one of {', '.join(Rule.model_fields)}")
    return policy


@dataclass(frozen=True)
class Breach:
    """A message that broke a rule."""

    place: str  # log and line
    process: str  # the silo, or the evaluator, to which the rule applies
    way: Way  # ``up`` if that process sent the message, ``down`` if it received it
    message: str  # kind of the message
    payload: str | None  # kind of the payload that broke the rule; None if the whole message did
    bytes: int  # size of that payload's tensors, of the message's frames, or of all messages so far, by rule
    rule: str  # place of the rule in the policy, and what it allows

    @property
    def what(self) -> str:
        """The breach in one line."""
        return f"{self.passed}: {self.rule}"

    @property
    def passed(self) -> str:
        """What passed, without the rule."""
        what = f"{self.message} with {self.payload}" if self.payload else self.message
        return f"{self.process} {self.way}, {what}, {self.bytes:,} bytes"


@dataclass(frozen=True)
class PolicyResult:
    """Result of checking a run's messages against a policy."""

    file: Path  # the policy file
    checked: int  # number of messages to which a rule applies; a message that both ends logged counts once
    free: int  # number of messages to which no rule applies
    breaches: tuple[Breach, ...]  # breaches in the order of the logs
    unknown: tuple[str, ...]  # silos that the policy names and no log mentions

    @property
    def findings(self) -> list[Finding]:
        """Findings for the auditor; empty if every checked message complies with the policy."""
        findings = [Finding(Cause.POLICY, breach.place, breach.what) for breach in self.breaches]
        findings += [
            Finding(Cause.POLICY, f"{self.file}: silos.{name}", "a silo that no log mentions") for name in self.unknown
        ]
        if not self.checked:
            what = "no message falls under this policy, so it was not tested"
            findings.append(Finding(Cause.POLICY, str(self.file), what))
        return findings

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data."""
        return {
            "ok": not self.findings,
            "file": str(self.file),
            "checked": self.checked,
            "not_held": self.free,
            "broken": [{**asdict(breach), "what": breach.what} for breach in self.breaches],
            "unknown_silos": list(self.unknown),
        }


def check_policy(audit: Audit, policy: Policy, file: Path) -> PolicyResult:
    """Check every sealed message of a run's logs against a policy.

    If the two ends of a message logged it differently (which is a finding of the audit), both versions are checked, so
    that neither log can hide a breach.
    """
    seen: dict[Frame, set[str]] = {}
    sums: Counter[tuple[str, Way]] = Counter()
    breaches: list[Breach] = []
    checked: set[Frame] = set()
    names = set(audit.records)
    for place, record in sorted(audit.messages, key=lambda message: message[1].action != "sent"):
        header, key = record.header, record.frame
        names |= {header.sender, header.receiver}
        content = repr((header.kind, record.payloads, record.bytes))
        first, known = key not in seen, seen.setdefault(key, set())
        if content in known:
            continue
        known.add(content)
        ends: tuple[tuple[str, Way], ...] = ((header.sender, "up"), (header.receiver, "down"))
        for process, way in ends:
            breach = partial(Breach, place, process, way, header.kind)
            if policy.peers is not None:
                checked.add(key)
                if process not in policy.peers:
                    allowed = ", ".join(policy.peers) or "no process"
                    breaches.append(breach(None, record.bytes, f"peers allows {allowed}"))
            rule, places = policy.rule(process, way)
            if process == COORDINATOR or rule == Rule():  # no rule applies to the coordinator
                continue
            checked.add(key)
            breaches += [breach(*limit[1:]) for limit in broken_limits(record.payloads, record.bytes, rule, places)]
            before, most = sums[process, way], rule.bytes_in_all
            sums[process, way] += record.bytes if first and counts_in_all(record.payloads) else 0
            if most is not None and before <= most < sums[process, way]:
                text = f"{places['bytes_in_all']} allows {most:,}, which this message exceeds"
                breaches.append(breach(None, sums[process, way], text))
    unknown = tuple(sorted(set(policy.silos) - names))
    return PolicyResult(file, len(checked), len(seen) - len(checked), tuple(breaches), unknown)


def counts_in_all(payloads: Sequence[tuple[str, int]]) -> bool:
    """Whether a message with these payloads (kind, bytes) counts in ``bytes_in_all``."""
    return any(kind != Refusal.KIND for kind, _ in payloads)


def broken_limits(
    payloads: Sequence[tuple[str, int]], size: int, rule: Rule, places: Mapping[str, str]
) -> Iterator[tuple[WithheldBy, str | None, int, str]]:
    """The limits that a message with payloads of these kinds and sizes, and of a size in all [bytes], breaks.

    Yields the broken limit, the kind of payload (None for the message as a whole), bytes, and what is allowed.
    """
    for kind, bytes_ in payloads:
        # A refusal says that a policy was kept, in two fixed words.
        if rule.kinds is not None and kind not in rule.kinds and kind != Refusal.KIND:
            text = f"{places['kinds']} allows {', '.join(rule.kinds) or 'nothing'}"
            yield WithheldBy.KINDS, kind, bytes_, text
        most = (rule.bytes_per_payload or {}).get(kind)
        if most is not None and bytes_ > most:
            yield WithheldBy.BYTES_PER_PAYLOAD, kind, bytes_, f"{places['bytes_per_payload']}.{kind} allows {most:,}"
    most, place = rule.bytes_per_message, places["bytes_per_message"]
    larger = rule.bytes_per_message_with or {}
    if limited := [kind for kind, _ in payloads if kind in larger]:
        kind = max(limited, key=lambda name: larger[name])
        most, place = larger[kind], f"{places['bytes_per_message_with']}.{kind}"
    if most is not None and size > most:
        yield WithheldBy.BYTES_PER_MESSAGE, None, size, f"{place} allows {most:,}"


def show(result: PolicyResult, console: Console) -> None:
    """Print the findings of checking a run against a policy; each rule, which may be long, once."""
    findings = result.findings
    rules = list(dict.fromkeys(breach.rule for breach in result.breaches))
    breaches = sorted(result.breaches, key=lambda breach: rules.index(breach.rule))[:_SHOWN]

    def line(place: str, what: str) -> str:
        return f"[red]{escape(printable(place))}[/red]: {escape(printable(what))}"

    for rule, those in groupby(breaches, key=lambda breach: breach.rule):
        console.print(f"{escape(printable(rule))}, but passed:", highlight=False, soft_wrap=True)
        for breach in those:
            console.print(f"  {line(breach.place, breach.passed)}", highlight=False, soft_wrap=True)
    for other in findings[len(result.breaches) :][: _SHOWN - len(breaches)]:
        console.print(line(other.place, other.what), highlight=False, soft_wrap=True)
    if len(findings) > _SHOWN:
        console.print(f"and {len(findings) - _SHOWN} more; --json has all", highlight=False)
    free = f"; no rule applies to {result.free:,} others" if result.free else ""
    verdict = f"{len(findings)} findings" if findings else "no breach"
    console.print(
        f"{result.checked:,} messages checked against {result.file}: {verdict}{free}",
        style="red" if findings else "green",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


# ------------------------------------------------------------------------------------------------------ at the silo
class PolicyGuard:
    """Decides which messages of a silo may leave it.

    Heartbeats and refusals, which hold nothing of the silo's data, always may.

    Args:
        policy: the rules; those for what this silo sends apply.
        sent: bytes of messages that count in ``bytes_in_all`` and were sent before.
        report: called with one line on what is withheld, with the numbers compared.

    Raises:
        InputError: the policy does not allow this silo or the coordinator to exchange messages at all.
    """

    def __init__(
        self, policy: Policy, silo: str, sent: int = 0, report: Callable[[str], object] = lambda _: None
    ) -> None:
        self._report = report
        for name in (silo, COORDINATOR):
            if policy.peers is not None and name not in policy.peers:
                allowed = f"{silo} and {COORDINATOR}, or do not start this silo"
                raise InputError("--policy: peers", f"a list without {name}", allowed)
        self._rule, self._places = policy.rule(silo, "up")
        self._sent = sent

    def broken(self, payloads: Sequence[Payload]) -> list[str]:
        """The limits that a message with these payloads would break, one line each; nothing is counted as sent."""
        least = sum(map(tensor_bytes, payloads))  # the frames add some hundred bytes
        return [line for _, _, line in self._broken(payloads, least, "a message")]

    def _broken(
        self, payloads: Sequence[Payload], size: int, message: str
    ) -> Iterator[tuple[WithheldBy, str | None, str]]:
        """The limits that a message breaks, the kind of payload (None for the message as a whole), and a line."""
        sizes = [(payload.KIND, tensor_bytes(payload)) for payload in payloads]
        for limit, kind, count, text in broken_limits(sizes, size, self._rule, self._places):
            yield limit, kind, f"{kind or message} of {count:,} bytes: {text}"
        for payload in payloads:
            if not _only_allowed_fields(payload, self._rule.fields or {}):
                what = f"{self._places['fields']}.{payload.KIND} does not allow all its fields"
                yield WithheldBy.FIELDS, payload.KIND, f"{payload.KIND}: {what}"
        most = self._rule.bytes_in_all
        if most is not None and self._sent + size > most:
            text = f"after {self._sent:,}: {self._places['bytes_in_all']} allows {most:,}"
            yield WithheldBy.BYTES_IN_ALL, None, f"{message} of {size:,} bytes {text}"

    def __call__(self, message: Message, size: int) -> Refusal | None:
        """What forbids a message whose frames have ``size`` bytes together; it is counted as sent if nothing does."""
        if all(payload.KIND == Refusal.KIND for payload in message.payloads):
            return None
        kind = message.header.kind.value
        if message.header.kind is Kind.AGREEMENT:
            kind = Kind.STATEMENT.value  # a refusal has no word for the confirmation, which completes the statement
        for limit, payload, line in self._broken(message.payloads, size, kind):
            self._report(f"withholds {line}")
            return Refusal(limit.value, payload or kind)
        self._sent += size
        return None


def _only_allowed_fields(payload: Payload, fields: Mapping[str, list[str]]) -> bool:
    """Whether no field of a payload has a value that a rule does not list; None and empty values do not count."""
    allowed = fields.get(payload.KIND)
    if allowed is None:
        return True
    return all(_is_empty(getattr(payload, name)) for name in payload.FIELDS if name not in allowed)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | tuple | Mapping) and not value)


def kinds_needed(scenario: Scenario) -> tuple[str, ...]:
    """Payload kinds that every silo of a run has to send: to join, and to evaluate on its own held-out items."""
    kinds: list[type[Payload]] = [DataStatement]
    if scenario.data is None:  # it states its format, and confirms the agreement
        kinds += [DataFormat, SiloModalities]
    if scenario.silos_evaluate:
        kinds.append(SiloMetrics)
    return tuple(kind.KIND for kind in kinds)


def guard_of(
    file: Path,
    silo: str,
    log: Path,
    needed: Sequence[str] = (DataStatement.KIND,),
    report: Callable[[str], object] = lambda _: None,
) -> PolicyGuard:
    """The guard of a silo, which continues with the bytes that its log has as sent.

    Args:
        file: the policy.
        silo: its name.
        log: its message log; need not exist.
        needed: payload kinds that it has to send, :func:`kinds_needed`.
        report: called with one line on what is withheld, with the numbers compared.

    Raises:
        InputError: the policy is invalid or forbids the silo to take part.
    """
    sent = 0
    if log.exists():
        for _, record in read_log(log):
            if isinstance(record, MessageRecord) and record.action == "sent" and counts_in_all(record.payloads):
                sent += record.bytes
    policy = read_policy(file)
    rule, places = policy.rule(silo, "up")
    if missing := [kind for kind in needed if rule.kinds is not None and kind not in rule.kinds]:
        problem, allowed = f"a list without {', '.join(missing)}", f"a list with {', '.join(needed)}"
        allowed += ", which this silo has to send in this run; or do not start it"
        raise InputError(f"{file}: {places['kinds']}", problem, allowed)
    return PolicyGuard(policy, silo, sent, report)
