"""Apply a policy at a silo before a message is sealed; the silo does not send what the policy forbids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedmq.audit.policy import Policy, broken_limits, counts_in_all, read_policy
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.messages import COORDINATOR, Kind, Message
from fedmq.wire.payloads import (
    DataFormat,
    DataStatement,
    Payload,
    Refusal,
    SiloMetrics,
    SiloModalities,
    WithheldBy,
    tensor_bytes,
)


class PolicyGuard:
    """Decides which messages of a silo may leave it.

    Heartbeats and refusals, which hold nothing of the silo's data, always may.

    Args:
        policy: the rules; those for what this silo sends apply.
        silo: its name.
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

    def require(self, needed: Sequence[str], file: Path) -> None:
        """Check that the policy allows the payload kinds without which the silo cannot take part.

        Args:
            needed: the kinds.
            file: the policy, for the error.

        Raises:
            InputError: its list of kinds lacks some of them.
        """
        missing = [kind for kind in needed if self._rule.kinds is not None and kind not in self._rule.kinds]
        if missing:
            place, problem = f"{file}: {self._places.get('kinds', 'up.kinds')}", f"a list without {', '.join(missing)}"
            allowed = f"a list with {', '.join(needed)}, which this silo has to send in this run"
            raise InputError(place, problem, f"{allowed}; or do not start it")

    def broken(self, payloads: Sequence[Payload]) -> list[str]:
        """The limits that a message with these payloads would break, one line each; nothing is counted as sent."""
        sizes = [(payload.KIND, tensor_bytes(payload)) for payload in payloads]
        least = sum(size for _, size in sizes)  # the frames add some hundred bytes
        lines = [
            f"{payload or 'a message'} of {count:,} bytes: {text}"
            for _, payload, count, text in broken_limits(sizes, least, self._rule, self._places)
        ]
        for payload in payloads:
            if not _only_allowed_fields(payload, self._rule.fields or {}):
                lines.append(f"{payload.KIND}: {self._places['fields']}.{payload.KIND} does not allow all its fields")
        most = self._rule.bytes_in_all
        if most is not None and self._sent + least > most:
            lines.append(f"a message of {least:,} bytes: {self._places['bytes_in_all']} allows {most:,}")
        return lines

    def __call__(self, message: Message, size: int) -> Refusal | None:
        """What forbids a message, which is counted as sent if nothing does.

        Args:
            message: message to be sealed.
            size: total size of all its frames [bytes].
        """
        payloads = [(payload.KIND, tensor_bytes(payload)) for payload in message.payloads]
        if not counts_in_all(payloads):
            return None
        kind = message.header.kind.value
        if message.header.kind is Kind.AGREEMENT:
            kind = Kind.STATEMENT.value  # a refusal has no word for the confirmation, which completes the statement
        for limit, payload, count, text in broken_limits(payloads, size, self._rule, self._places):
            self._report(f"withholds a {payload or kind} of {count:,} bytes: {text}")
            return Refusal(limit.value, payload or kind)
        for content in message.payloads:
            if not _only_allowed_fields(content, self._rule.fields or {}):
                return Refusal(WithheldBy.FIELDS.value, content.KIND)
        most = self._rule.bytes_in_all
        if most is not None and self._sent + size > most:
            already = f"{size:,} bytes after {self._sent:,}"
            self._report(f"withholds a {kind} of {already}: {self._places['bytes_in_all']} allows {most:,}")
            return Refusal(WithheldBy.BYTES_IN_ALL.value, kind)
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
    guard = PolicyGuard(read_policy(file), silo, sent, report)
    guard.require(needed, file)
    return guard
