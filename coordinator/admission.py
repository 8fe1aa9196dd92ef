"""Admission of silos and the evaluator by what they state about their data, before they get work.

In a simulated partition all processes must have the coordinator's data set. With ``partition.kind own`` the coordinator
has none: it waits until all silos have stated their formats, sends all of them what they agree on, and admits each that
confirms it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from fedmq.data.splits import SPLITS
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.agreement import FormatError, agreed_format, difference, run_data_of
from fedmq.federation.run_data import RunData
from fedmq.runs.data_records import AgreementRecord
from fedmq.wire.fields import FieldError
from fedmq.wire.messages import EVALUATOR, Kind, Message, Reason
from fedmq.wire.payload_digest import digest
from fedmq.wire.payloads import IMAGE, TEXT, DataFormat, DataStatement, Payload, SiloModalities

_SHOWN = 12  # characters of a digest in a message
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Admitted:
    """The peer has joined and is ready for work."""


@dataclass(frozen=True)
class Waiting:
    """The peer has stated its data; other silos have not."""


@dataclass(frozen=True)
class Agree:
    """The peer is sent what the silos agreed on, and has to confirm it."""

    payloads: tuple[Payload, ...]


class Admission(Protocol):
    """What the roster asks about the messages ``statement`` and ``agreement`` of a peer."""

    def decide(self, name: str, message: Message) -> Admitted | Waiting | Agree:
        """Handle a peer's message.

        Raises:
            RemoteWireError: ``data`` if its data do not fit the run's, ``unexpected`` for other payloads.
        """

    def record(self) -> AgreementRecord:
        """What was stated, for the run folder."""


def _stated(message: Message, kinds: Sequence[type[Payload]]) -> tuple[Payload, ...]:
    """The payloads of a message that must have exactly these kinds, in this order."""
    if [type(each) for each in message.payloads] != list(kinds):
        wanted = ", ".join(kind.KIND for kind in kinds)
        raise RemoteWireError(Reason.UNEXPECTED, f"a {message.header.kind} without exactly {wanted}")
    return message.payloads


class SimulatedAdmission:
    """Admits peers that have the coordinator's data set.

    Args:
        expected: the salted digest of the coordinator's data set.
        run: the run's id.

    Attributes:
        stated: what each peer stated.
    """

    def __init__(self, expected: str, run: str) -> None:
        self._expected, self._run = expected, run
        self.stated: dict[str, tuple[DataStatement, DataFormat | None]] = {}

    def decide(self, name: str, message: Message) -> Admitted:
        """Admit a peer that states the same data; see :class:`Admission`."""
        if message.header.kind is not Kind.STATEMENT:
            raise RemoteWireError(Reason.UNEXPECTED, f"a {message.header.kind} in a simulated partition")
        (stated,) = _stated(message, (DataStatement,))
        assert isinstance(stated, DataStatement)  # noqa: S101 - checked above
        if stated.data != self._expected:
            raise RemoteWireError(
                Reason.DATA,
                f"{name} has other data (digest {stated.data[:_SHOWN]}) than the coordinator "
                f"({self._expected[:_SHOWN]}); give every process the same data set, or use partition.kind own",
            )
        self.stated[name] = stated, None
        return Admitted()

    def record(self) -> AgreementRecord:
        """What was stated, for the run folder."""
        return AgreementRecord.of(self._run, self.stated)


class OwnDataAdmission:
    """Has silos with data of their own agree on labels and inputs, and admits those that confirm the agreement.

    Args:
        silos: names of all silos.
        run: the run's id.
        evaluator: whether the run has an evaluator.
        known: of an earlier process of this coordinator; None in a new run.

    Attributes:
        stated: what each peer stated.
        agreed: the agreed format; None until all silos have stated theirs.

    Raises:
        InputError: ``known`` is of other silos or of another run.
    """

    def __init__(
        self, silos: Sequence[str], run: str, *, evaluator: bool, known: AgreementRecord | None = None
    ) -> None:
        self._silos, self._run, self._evaluator = tuple(silos), run, evaluator
        self.stated: dict[str, tuple[DataStatement, DataFormat | None]] = {}
        self.agreed: DataFormat | None = None
        if known is not None:
            self._resume(known)

    def _resume(self, known: AgreementRecord) -> None:
        allowed = "the agreement of this run's silos"
        try:
            for name, each in known.stated.items():
                self.stated[name] = each.payload(), None if each.format is None else each.format.payload()
            self.agreed = None if known.agreed is None else known.agreed.payload()
        except FieldError as error:
            raise InputError("agreement.json", str(error), allowed) from None
        if self.agreed is None or known.run != self._run or not set(self._silos) <= self.stated.keys():
            raise InputError("agreement.json", f"an agreement of run {known.run}", allowed)

    @property
    def missing(self) -> tuple[str, ...]:
        """Silos that have not stated their data."""
        return tuple(name for name in self._silos if name not in self.stated)

    def decide(self, name: str, message: Message) -> Admitted | Waiting | Agree:
        """Handle a statement or a confirmation; see :class:`Admission`."""
        if name == EVALUATOR and not self._evaluator:
            detail = "this run has no evaluator: evaluation.heldout is own, the silos evaluate"
            raise RemoteWireError(Reason.DATA, detail)
        if message.header.kind is Kind.AGREEMENT:
            if self.agreed is None or [*map(digest, message.payloads)] != [*map(digest, self.agreement)]:
                raise RemoteWireError(Reason.DATA, f"{name} confirmed another agreement than it was sent")
            return Admitted()
        statement, held = _stated(message, (DataStatement, DataFormat))
        assert isinstance(statement, DataStatement) and isinstance(held, DataFormat)  # noqa: S101 - checked above
        self._check(name, statement, held)
        if self.agreed is None:
            self.stated[name] = statement, held
            return Waiting()
        self._check_agreed(name, statement, held, self.agreed)
        self.stated[name] = statement, held
        return Agree(self.agreement)

    def _check(self, name: str, statement: DataStatement, held: DataFormat) -> None:
        """Refuse a statement that is inconsistent, or does not fit those of the other silos."""
        has = {"image": bool(statement.mask & IMAGE), "text": bool(statement.mask & TEXT)}
        said = {modality: getattr(held, f"{modality}_dtype") != "none" for modality in has}
        alone = [column for column, modality in ((1, "image"), (2, "text")) if not has[modality]]
        if has != said or not any(has.values()) or statement.counts[:, alone].any():
            raise RemoteWireError(Reason.UNEXPECTED, f"a statement of {name} whose parts contradict each other")
        if name != EVALUATOR and not statement.counts[SPLITS.index("train")].any():
            raise RemoteWireError(Reason.DATA, f"{name} has no training item")
        if self.agreed is not None:
            return
        for other, (_, reference) in self.stated.items():
            if other == name or reference is None:
                continue
            if (wrong := difference(name, held, other, reference)) is not None:
                raise RemoteWireError(Reason.DATA, wrong)

    def _check_agreed(self, name: str, statement: DataStatement, held: DataFormat, agreed: DataFormat) -> None:
        """Refuse a peer that rejoins with other data, or an evaluator whose data do not fit the agreement."""
        before = self.stated.get(name)
        if before is not None and before[1] is not None:
            if [digest(before[0]), digest(before[1])] != [digest(statement), digest(held)]:
                raise RemoteWireError(
                    Reason.DATA,
                    f"{name} has other data (digest {statement.data[:_SHOWN]}) than when the run began "
                    f"({before[0].data[:_SHOWN]}); start it with the data as they were",
                )
            return
        wrong = difference(name, held, "the run", agreed)
        unknown = sorted(set(held.label_names) - set(agreed.label_names))
        if wrong is None and unknown:
            wrong = f"{name} has the label {unknown[0]!r}, which no silo has"
        if wrong is not None:
            raise RemoteWireError(Reason.DATA, wrong)

    def agree(self) -> None:
        """Settle the agreement, once all silos have stated their formats.

        Raises:
            FormatError: a modality is in no silo.
        """
        self.agreed = agreed_format({name: held for name in self._silos if (held := self.stated[name][1]) is not None})

    @property
    def agreement(self) -> tuple[DataFormat, SiloModalities]:
        """The payloads of the agreement."""
        assert self.agreed is not None  # noqa: S101 - called once there is one
        masks = np.array([self.stated[name][0].mask for name in self._silos], np.int64)
        return self.agreed, SiloModalities(self._silos, masks)

    def run_data(self, cache: Path) -> RunData:
        """The facts about the run's data that the coordinator needs.

        Args:
            cache: this process's cache folder.
        """
        agreed, modalities = self.agreement
        digests = [f"{name} {self.stated[name][0].data}\n" for name in self._silos]
        counts = {name: self.stated[name][0].counts for name in self._silos}
        whole = hashlib.sha256("".join(digests).encode()).hexdigest()
        return run_data_of(agreed, modalities, cache, counts, whole)

    def record(self) -> AgreementRecord:
        """What was stated and agreed on, for the run folder."""
        return AgreementRecord.of(self._run, self.stated, self.agreed)


class Gathering(Protocol):
    """The part of the roster that is needed while silos agree."""

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        """The next message, see :class:`coordinator.peers.Peers`."""

    def take(self, address: bytes, frames: Sequence[memoryview]) -> object:
        """Decode it, and handle statements."""

    def refuse(self, name: str, error: RemoteWireError, size: int) -> None:
        """Count and log a refusal."""


def gather(
    roster: Gathering,
    admission: OwnDataAdmission,
    *,
    report: Callable[[tuple[str, ...]], None],
    stop_wanted: Callable[[], bool],
) -> bool:
    """Wait until all silos have stated their data, and settle what they agree on.

    Args:
        roster: the run's peers.
        admission: collects their statements.
        report: called a few times per second with the silos that are missing.
        stop_wanted: true ends the wait.

    Returns:
        Whether the silos agree; False if a stop was requested.

    Raises:
        InputError: no silo has one of the two modalities.
    """
    while admission.missing:
        if stop_wanted():
            return False
        report(admission.missing)
        try:
            received = roster.receive(_POLL_SECONDS)
        except RemoteWireError as error:
            roster.refuse("unknown", error, 0)
            continue
        if received is not None:
            roster.take(*received)
    if admission.agreed is None:
        try:
            admission.agree()
        except FormatError as error:
            raise InputError("the silos' data", str(error), "images in one silo at least, and captions") from None
    return True
