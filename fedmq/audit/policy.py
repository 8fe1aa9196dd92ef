"""What may pass between silos and coordinator: a policy that an auditor writes, and a run's messages held against it.

A policy speaks of what the logs record of every sealed message: who sent it to whom, the kinds of its payloads, the
bytes of their tensors, and the bytes of all its frames. The rest of a payload (numbers, names, text) is in the frames'
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError
from rich.console import Console
from rich.markup import escape

from fedmq.audit.log_checks import Audit, Finding
from fedmq.config.loader import input_error, read_yaml
from fedmq.config.parts import Name, Part
from fedmq.errors import InputError
from fedmq.text import printable
from fedmq.wire.log_records import Frame, MessageRecord
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from fedmq.wire.payloads import PAYLOADS

Way = Literal["up", "down"]
_ALLOWED = "a policy (YAML) with up, down, evaluator, silos or peers; docs/howto/audit.md describes it"
_SHOWN = 20  # broken rules printed; JSON has all


def _known(kind: str) -> str:
    if kind not in PAYLOADS:
        raise ValueError(f"one of {', '.join(sorted(PAYLOADS))}")
    return kind


_Kind = Annotated[str, AfterValidator(_known)]
_Bytes = Annotated[int, Field(strict=True, ge=0)]


class Rule(Part):
    """What one way of a silo's messages may hold; a key that is left out or null limits nothing."""

    kinds: list[_Kind] | None = Field(None, description="payload kinds that may pass")
    bytes_per_payload: dict[_Kind, _Bytes] | None = Field(None, description="largest tensors of a payload, by kind")
    bytes_per_message: _Bytes | None = Field(None, description="largest message: all its frames, as sealed")
    bytes_per_message_with: dict[_Kind, _Bytes] | None = Field(
        None, description="in its place for a message that holds such a payload, by kind; of several the largest"
    )
    bytes_in_all: _Bytes | None = Field(None, description="largest sum of all frames of one silo over the run")


class Ways(Part):
    """Up is what a process sends, down is what it is sent."""

    up: Rule = Rule()
    down: Rule = Rule()


class Policy(Ways):
    """A policy: one rule for every silo each way, and what is different for some.

    Args:
        up: of what each silo sends.
        down: of what each silo is sent.
        evaluator: of what the evaluator sends and is sent; it is no silo, and ``up`` and ``down`` do not speak of it.
        silos: by name; a key given here replaces that key of ``up`` or ``down``, the others stay.
        peers: the processes that may send or be sent anything.
    """

    evaluator: Ways = Ways()
    silos: dict[Name, Ways] = Field(default_factory=dict)
    peers: list[Name] | None = None

    def rule(self, process: str, way: Way) -> tuple[Rule, dict[str, str]]:
        """The rule of one process's messages one way, and for each of its keys the place in the policy it stands at."""
        if process == EVALUATOR:
            return getattr(self.evaluator, way), {key: f"evaluator.{way}.{key}" for key in Rule.model_fields}
        general: Rule = getattr(self, way)
        own: Rule = getattr(self.silos.get(process, Ways()), way)
        given = own.model_fields_set
        places = {key: f"silos.{process}.{way}.{key}" if key in given else f"{way}.{key}" for key in Rule.model_fields}
        return general.model_copy(update={key: getattr(own, key) for key in given}), places


def read_policy(path: Path) -> Policy:
    """Read a policy.

    Args:
        path: the YAML file.

    Raises:
        InputError: it cannot be read, a key or value is not allowed, or it limits nothing: the place, what stands
            there, and what may.
    """
    try:
        raw = read_yaml(path)
    except InputError as error:
        raise InputError(error.place, error.found, _ALLOWED) from None
    try:
        policy = Policy.model_validate(raw)
    except ValidationError as error:
        raise _input_error(error, path) from None
    strange = sorted({COORDINATOR, EVALUATOR} & set(policy.silos))
    if strange:
        raise InputError(f"{path}: silos", strange[0], "names of silos; the evaluator has a key of its own")
    every = [
        getattr(ways, way) for ways in (policy, policy.evaluator, *policy.silos.values()) for way in ("up", "down")
    ]
    if policy.peers is None and all(rule == Rule() for rule in every):
        raise InputError(str(path), "a policy that limits nothing", f"at least one of {', '.join(Rule.model_fields)}")
    return policy


def _input_error(error: ValidationError, path: Path) -> InputError:
    told, first = input_error(error, path), error.errors()[0]
    place, found, allowed = told.place.removesuffix(".[key]"), told.found, told.allowed
    if first["type"] == "extra_forbidden":
        location = first["loc"]
        below = Rule if len(location) > 1 and location[-2] in ("up", "down") else Ways
        allowed = f"one of {', '.join((Policy if len(location) == 1 else below).model_fields)}"
    elif first["type"] in ("model_type", "dict_type"):
        allowed = "a mapping"
    elif isinstance(first["input"], dict):
        found = "a mapping"
    return InputError(place, found, allowed)


@dataclass(frozen=True)
class Breach:
    """A message that broke a rule.

    Args:
        place: log and line.
        process: whose rule it is: a silo, or the evaluator.
        way: ``up`` if that process sent the message.
        message: its kind.
        payload: kind of the payload that broke the rule; None where the whole message did.
        bytes: of that payload's tensors, of the message's frames, or of all messages so far, as the rule counts.
        rule: the rule's place in the policy, and what it allows.
    """

    place: str
    process: str
    way: Way
    message: str
    payload: str | None
    bytes: int
    rule: str

    @property
    def what(self) -> str:
        """One line."""
        held = f"{self.message} with {self.payload}" if self.payload else self.message
        return f"{self.process} {self.way}, {held}, {self.bytes:,} bytes: {self.rule}"


@dataclass(frozen=True)
class Held:
    """A run's messages held against a policy.

    Args:
        file: the policy.
        held: messages that a rule speaks of; one that both ends logged counts once.
        free: messages that no rule speaks of.
        breaches: in the order of the logs.
        unknown: silos that the policy names and no log tells of.
    """

    file: Path
    held: int
    free: int
    breaches: tuple[Breach, ...]
    unknown: tuple[str, ...]

    @property
    def findings(self) -> list[Finding]:
        """What an auditor must know: an empty list means that all that was held keeps to the policy."""
        found = [Finding(breach.place, breach.what) for breach in self.breaches]
        found += [Finding(f"{self.file}: silos.{name}", "a silo that no log tells of") for name in self.unknown]
        if not self.held:
            found.append(Finding(str(self.file), "no message falls under this policy: nothing is shown"))
        return found

    def to_plain(self) -> dict[str, Any]:
        """As JSON-serialisable data."""
        return {
            "ok": not self.findings,
            "file": str(self.file),
            "held": self.held,
            "not_held": self.free,
            "broken": [{**asdict(breach), "what": breach.what} for breach in self.breaches],
            "unknown_silos": list(self.unknown),
        }


def hold(audit: Audit, policy: Policy, file: Path) -> Held:
    """Hold every sealed message of a run's logs against a policy.

    A message is held as its sender logged it, and again as its receiver did where the two disagree: the audit finds the
    disagreement, and neither end's word hides what the other's says.

    Args:
        audit: of the run.
        policy: what may pass.
        file: where the policy stands, for the report.
    """
    seen: dict[Frame, set[str]] = {}
    sums: Counter[tuple[str, Way]] = Counter()
    breaches: list[Breach] = []
    spoken: set[Frame] = set()
    names = set(audit.records)
    for place, record in sorted(audit.messages, key=lambda message: message[1].action != "sent"):
        names |= {record.header.sender, record.header.receiver}
        key, kind = record.frame, record.header.kind
        content = repr((kind, record.payloads, record.bytes))
        first, known = key not in seen, seen.setdefault(key, set())
        if content in known:
            continue
        known.add(content)
        if policy.peers is not None:
            spoken.add(key)
            breaches += _stranger(place, record, policy.peers)
        for process, way in _ends(record):
            rule, places = policy.rule(process, way)
            if rule == Rule():
                continue
            spoken.add(key)
            breaches += _broken(place, record, process, way, rule, places)
            before = sums[process, way]
            sums[process, way] += record.bytes if first else 0
            most = rule.bytes_in_all
            if most is not None and before <= most < sums[process, way]:
                text = f"{places['bytes_in_all']} allows {most:,}, and this message goes beyond it"
                breaches.append(Breach(place, process, way, kind, None, sums[process, way], text))
    unknown = tuple(sorted(set(policy.silos) - names))
    return Held(file, len(spoken), len(seen) - len(spoken), tuple(breaches), unknown)


def _ends(record: MessageRecord) -> Iterator[tuple[str, Way]]:
    """The processes whose messages up or down a message is; the coordinator has none of its own."""
    if record.header.sender != COORDINATOR:
        yield record.header.sender, "up"
    if record.header.receiver != COORDINATOR:
        yield record.header.receiver, "down"


def _stranger(place: str, record: MessageRecord, peers: list[str]) -> Iterator[Breach]:
    ends: tuple[tuple[str, Way], ...] = ((record.header.sender, "up"), (record.header.receiver, "down"))
    for process, way in ends:
        if process not in peers:
            text = f"peers allows {', '.join(peers) or 'nobody'}"
            yield Breach(place, process, way, record.header.kind, None, record.bytes, text)


def _broken(
    place: str, record: MessageRecord, process: str, way: Way, rule: Rule, places: dict[str, str]
) -> Iterator[Breach]:
    """What a single message breaks of the rule of one of its ends."""
    for kind, size in record.payloads:
        if rule.kinds is not None and kind not in rule.kinds:
            text = f"{places['kinds']} allows {', '.join(rule.kinds) or 'nothing'}"
            yield Breach(place, process, way, record.header.kind, kind, size, text)
        most = (rule.bytes_per_payload or {}).get(kind)
        if most is not None and size > most:
            text = f"{places['bytes_per_payload']}.{kind} allows {most:,}"
            yield Breach(place, process, way, record.header.kind, kind, size, text)
    most, place_ = rule.bytes_per_message, places["bytes_per_message"]
    larger = rule.bytes_per_message_with or {}
    if held := [kind for kind, _ in record.payloads if kind in larger]:
        kind = max(held, key=lambda each: larger[each])
        most, place_ = larger[kind], f"{places['bytes_per_message_with']}.{kind}"
    if most is not None and record.bytes > most:
        text = f"{place_} allows {most:,}"
        yield Breach(place, process, way, record.header.kind, None, record.bytes, text)


def show(held: Held, console: Console) -> None:
    """Print what holding a run against a policy showed."""
    findings = held.findings
    for finding in findings[:_SHOWN]:
        place, what = escape(printable(finding.place)), escape(printable(finding.what))
        console.print(f"[red]{place}[/red]: {what}", highlight=False, soft_wrap=True)
    if len(findings) > _SHOWN:
        console.print(f"and {len(findings) - _SHOWN} more; --json has all", highlight=False)
    free = f"; it does not speak of {held.free:,} others" if held.free else ""
    verdict = f"{len(findings)} findings" if findings else "none broke it"
    console.print(
        f"{held.held:,} messages held against {held.file}: {verdict}{free}",
        style="red" if findings else "green",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
