"""Admission of silos and the evaluator by what they state about their data, before they get work.

In a simulated partition all processes must have the coordinator's data set. With ``partition.kind own`` the coordinator
has none: it waits until all silos, or ``participation.minimum`` of them, have stated their formats, sends them what
they agree on, and admits each that confirms it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from fedmq.data.splits import SPLITS
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.agreement import RunData, agreed_format, difference, run_data_of, unknown_name
from fedmq.runs.data_records import AgreementRecord
from fedmq.text import first_few
from fedmq.wire.codec import digest
from fedmq.wire.fields import FieldError
from fedmq.wire.messages import EVALUATOR, Kind, Message, Reason
from fedmq.wire.payloads import IMAGE, TEXT, DataFormat, DataStatement, Payload, SiloModalities


class FormatConflicts:
    """The formats that silos have stated, and which of them do not fit together."""

    def __init__(self) -> None:
        self.formats: dict[str, DataFormat] = {}  # each silo's format, in the order in which they were stated
        self._against: dict[str, set[str]] = {}

    def state(self, name: str, held: DataFormat) -> None:
        """A silo states its data, for the first time or again."""
        self.withdraw(name)
        others = {other for other, format_ in self.formats.items() if difference(name, held, other, format_)}
        self.formats[name], self._against[name] = held, others
        for other in others:
            self._against[other].add(name)

    def withdraw(self, name: str) -> None:
        """Forget what a silo stated."""
        self.formats.pop(name, None)
        for other in self._against.pop(name, ()):
            self._against[other].discard(name)

    @property
    def open(self) -> str:
        """How two silos that wait for further ones differ; empty if all fit together."""
        for name, others in self._against.items():
            for other in sorted(others):
                return self._difference(name, other)
        return ""

    def _difference(self, name: str, other: str) -> str:
        return difference(name, self.formats[name], other, self.formats[other]) or ""

    def refused(self, *, complete: bool) -> dict[str, str]:
        """The silos to refuse, with the line for their operators; ``complete`` if all silos have stated their data."""
        found = dict[str, str]()
        for name, others in self._against.items():
            better = [other for other in others if len(self._against[other]) < len(self._against[name])]
            if better:
                found[name] = self._outvoted(name, min(better, key=lambda other: (len(self._against[other]), other)))
        if complete and not found:
            order = list(self.formats)
            for name, others in self._against.items():
                earlier = [other for other in others if order.index(other) < order.index(name)]
                if earlier:
                    found[name] = self._undecided(name, min(earlier, key=order.index))
        return found

    def _outvoted(self, name: str, other: str) -> str:
        silos = len(self.formats)
        fits = [silos - len(self._against[each]) - 1 for each in (name, other)]
        return (
            f"{self._difference(name, other)}; {name} fits with {fits[0]} of the other silos that have stated their "
            f"data, {other} with {fits[1]}. Correct the data of {name} and start it again; if {other} is wrong, "
            "correct the data of the silos that agree with it, and start them again"
        )

    def _undecided(self, name: str, other: str) -> str:
        return (
            f"{self._difference(name, other)}, and no other silo shows which of them is wrong. If it is {name}, "
            f"correct its data and start it again; if it is {other}, which stated its data first, stop {other}, "
            f"correct its data, and start both again"
        )


_SHOWN = 12  # characters of a digest shown in a message
_NAMED = 3  # silos named in a message


@dataclass(frozen=True)
class Admitted:
    """The peer has joined and is ready for work."""


@dataclass(frozen=True)
class Waiting:
    """The peer has stated its data and waits for other silos, or, after the agreement, for the next round."""

    # Peers refused because of this statement, with the message for their operators. They may include this peer.
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agree:
    """The peer is sent what the silos agreed on, and has to confirm it."""

    payloads: tuple[Payload, ...]


class Admission(Protocol):
    """Decides how the roster handles a peer's ``statement`` and ``agreement`` messages."""

    def decide(self, name: str, message: Message) -> Admitted | Waiting | Agree:
        """Handle a peer's message.

        Raises:
            RemoteWireError: ``data`` if its data do not fit the run's, ``unexpected`` for other payloads.
        """

    def withdraw(self, name: str) -> None:
        """A peer's key is no longer accepted."""

    def record(self) -> AgreementRecord:
        """What was stated, for the run folder."""


def _stated(message: Message, kinds: Sequence[type[Payload]]) -> tuple[Payload, ...]:
    """The payloads of a message that must have exactly these kinds, in this order."""
    if [type(each) for each in message.payloads] != list(kinds):
        wanted = ", ".join(kind.KIND for kind in kinds)
        raise RemoteWireError(Reason.UNEXPECTED, f"a {message.header.kind} without exactly {wanted}")
    return message.payloads


#: What peers stated about their data, by name.
Stated = Mapping[str, tuple[DataStatement, DataFormat | None]]


class SimulatedAdmission:
    """Admits peers that have the coordinator's data set, and of it what the partition assigns to them."""

    def __init__(self, expected: Mapping[str, DataStatement], run: str) -> None:
        self._expected, self._run = expected, run
        self.stated: dict[str, tuple[DataStatement, DataFormat | None]] = {}

    def decide(self, name: str, message: Message) -> Admitted:
        """Admit a peer that states the data that it has in the coordinator's partition; see :class:`Admission`."""
        if message.header.kind is not Kind.STATEMENT:
            raise RemoteWireError(Reason.UNEXPECTED, f"a {message.header.kind} in a simulated partition")
        (stated,) = _stated(message, (DataStatement,))
        assert isinstance(stated, DataStatement)  # noqa: S101 - checked above
        expected = self._expected[name]
        if stated.data != expected.data:
            raise RemoteWireError(
                Reason.DATA,
                f"{name} has other data (digest {stated.data[:_SHOWN]}) than the coordinator "
                f"({expected.data[:_SHOWN]}); give every process the same data set, or use partition.kind own",
            )
        # Without this check, agreement.json, summary.json and the report would show what a process invents.
        if digest(stated) != digest(expected):
            raise RemoteWireError(
                Reason.DATA,
                f"{name} states {_described(stated)}; the partition gives it {_described(expected)}; "
                "state these numbers, or give every process the same release of fedmq",
            )
        self.stated[name] = stated, None
        return Admitted()

    def withdraw(self, name: str) -> None:
        """Nothing depends on what one silo stated; see :class:`Admission`."""

    def record(self) -> AgreementRecord:
        """What was stated, for the run folder."""
        return AgreementRecord.of(self._run, self.stated)


class OwnDataAdmission:
    """Lets silos with their own data agree on labels and inputs, and admits those that confirm the agreement.

    With ``minimum`` silos agree without waiting for the others. A silo that states its data later joins if they fit the
    agreement; the coordinator includes it between two rounds (:meth:`include`).

    Raises:
        InputError: ``known`` belongs to other silos or another run.
    """

    def __init__(
        self,
        silos: Sequence[str],
        run: str,
        *,
        evaluator: bool,  # whether the run has an evaluator
        # The agreement that an earlier process of this coordinator recorded; None in a new run.
        known: AgreementRecord | None = None,
        minimum: int | None = None,  # number of silos that can agree without the others; None for all
    ) -> None:
        self._silos, self._run, self._evaluator, self._minimum = tuple(silos), run, evaluator, minimum
        self.stated: dict[str, tuple[DataStatement, DataFormat | None]] = {}  # what each peer stated
        # What silos stated after the agreement that are not included yet.
        self.late: dict[str, tuple[DataStatement, DataFormat]] = {}
        self.agreed: DataFormat | None = None  # the agreed format; None until enough silos have stated theirs
        self.conflicts = FormatConflicts()  # the formats stated before the agreement
        self._included: list[str] = []
        self._confirmable: list[list[str]] = []
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
        self._included = list(known.late)
        if self.agreed is None or known.run != self._run or not self._known or (self.missing and not self._minimum):
            raise InputError("agreement.json", f"an agreement of run {known.run}", allowed)
        self._remember()

    @property
    def _known(self) -> tuple[str, ...]:
        """Silos that have stated their data and are not late, in the order of the run."""
        return tuple(name for name in self._silos if name in self.stated)

    @property
    def missing(self) -> tuple[str, ...]:
        """Silos that have not stated their data."""
        return tuple(name for name in self._silos if name not in self.stated)

    @property
    def agreeable(self) -> bool:
        """Whether silos can agree: all of them or the minimum have stated their data, which fit together."""
        enough = not self.missing or (self._minimum is not None and len(self._known) >= self._minimum)
        return self.agreed is not None or (enough and not self.conflicts.open)

    def decide(self, name: str, message: Message) -> Admitted | Waiting | Agree:
        """Handle a statement or a confirmation; see :class:`Admission`."""
        if name == EVALUATOR and not self._evaluator:
            detail = "this run has no evaluator: evaluation.heldout is own, the silos evaluate"
            raise RemoteWireError(Reason.DATA, detail)
        if message.header.kind is Kind.AGREEMENT:
            # A silo that was included in the meantime changed the list of silos, not the agreement.
            if [*map(digest, message.payloads)] not in self._confirmable or name not in self.stated:
                raise RemoteWireError(Reason.DATA, f"{name} confirmed another agreement than it was sent")
            return Admitted()
        statement, held = _stated(message, (DataStatement, DataFormat))
        assert isinstance(statement, DataStatement) and isinstance(held, DataFormat)  # noqa: S101 - checked above
        _check_consistent(name, statement, held)
        if self.agreed is None:
            return self._state(name, statement, held)
        if name in self.stated:
            self._check_same(name, statement, held)
            return Agree(self.agreement)
        self._check_fits(name, held, self.agreed)
        if name == EVALUATOR:
            self.stated[name] = statement, held
            return Agree(self.agreement)
        self.late[name] = statement, held
        return Waiting()

    def _state(self, name: str, statement: DataStatement, held: DataFormat) -> Waiting:
        """Record a statement before the agreement; returns the names of the silos that are refused because of it."""
        self.stated[name] = statement, held
        self.conflicts.state(name, held)
        refused = self.conflicts.refused(complete=not self.missing)
        for each in refused:
            self.conflicts.withdraw(each)
            del self.stated[each]
        return Waiting(refused)

    def withdraw(self, name: str) -> None:
        """Forget what a silo has stated, unless the silos have agreed on it; see :class:`Admission`."""
        self.late.pop(name, None)
        if self.agreed is None:
            self.conflicts.withdraw(name)
            self.stated.pop(name, None)

    def _check_same(self, name: str, statement: DataStatement, held: DataFormat) -> None:
        """Refuse a peer that rejoins with other data."""
        before, format_ = self.stated[name]
        if format_ is not None and [digest(before), digest(format_)] != [digest(statement), digest(held)]:
            raise RemoteWireError(
                Reason.DATA,
                f"{name} has other data (digest {statement.data[:_SHOWN]}) than when the run began "
                f"({before.data[:_SHOWN]}); start it with its original data",
            )

    def _check_fits(self, name: str, held: DataFormat, agreed: DataFormat) -> None:
        """Refuse a silo or an evaluator whose data do not fit what was agreed on before it stated them."""
        who = f"the agreement of {first_few([each for each in self._known if each not in self._included], _NAMED)}"
        again = f"or start a new run with participation.minimum {len(self._silos)}, in which it states its data in time"
        if (wrong := difference(name, held, who, agreed)) is not None:
            detail = f"{wrong}; correct the data of {name} and start it again, {again}"
        elif (wrong := unknown_name(name, held, agreed)) is not None:
            detail = f"{wrong}, which {who} lacks; leave such items or columns out, {again}"
        else:
            return
        raise RemoteWireError(Reason.DATA, detail.removesuffix(f", {again}") if name == EVALUATOR else detail)

    def agree(self) -> None:
        """Settle the agreement of the silos that have stated their formats.

        Raises:
            FormatError: a modality is in no silo.
        """
        self.agreed = self._agreed_format()
        self._remember()

    @property
    def likely(self) -> DataFormat | None:
        """The agreed format, or the one on which the silos would agree now; None if none has stated its data.

        Raises:
            FormatError: a modality is in no silo, or their data do not fit together.
        """
        return self.agreed or (self._agreed_format() if self._known else None)

    def _agreed_format(self) -> DataFormat:
        return agreed_format({name: held for name in self._known if (held := self.stated[name][1]) is not None})

    def candidate(self, cache: Path) -> RunData:
        """The facts about the run's data if the silos that have stated theirs agree now.

        Raises:
            FormatError: a modality is in no silo.
        """
        return self._run_data(self._agreed_format(), self._modalities(self.stated), self.stated, cache)

    def with_late(self, name: str, cache: Path) -> RunData:
        """The facts about the run's data if a late silo is included; arguments as in :meth:`candidate`."""
        assert self.agreed is not None  # noqa: S101 - only then silos are late
        stated = {**self.stated, name: self.late[name]}
        return self._run_data(self.agreed, self._modalities(stated), stated, cache)

    def include(self, name: str) -> None:
        """Include a late silo: it is sent the agreement with the next offer."""
        self.stated[name] = self.late.pop(name)
        self._included.append(name)
        self._remember()

    @property
    def agreement(self) -> tuple[DataFormat, SiloModalities]:
        """The payloads of the agreement."""
        assert self.agreed is not None  # noqa: S101 - called once there is one
        return self.agreed, self._modalities(self.stated)

    def _remember(self) -> None:
        """Note the agreement as one that peers may confirm."""
        self._confirmable.append([*map(digest, self.agreement)])

    def _modalities(self, stated: Stated) -> SiloModalities:
        names = tuple(name for name in self._silos if name in stated)
        return SiloModalities(names, np.array([stated[name][0].mask for name in names], np.int64))

    def run_data(self, cache: Path) -> RunData:
        """The facts about the run's data that the coordinator needs; arguments as in :meth:`candidate`."""
        return self._run_data(*self.agreement, self.stated, cache)

    def _run_data(self, agreed: DataFormat, modalities: SiloModalities, stated: Stated, cache: Path) -> RunData:
        names = modalities.silos
        first, whole = (
            hashlib.sha256("".join(f"{name} {stated[name][0].data}\n" for name in chosen).encode()).hexdigest()
            for chosen in ([name for name in names if name in self.stated and name not in self._included], names)
        )
        nothing = np.zeros((len(SPLITS), 3), np.int64)
        counts = {name: stated[name][0].counts if name in stated else nothing for name in self._silos}
        return run_data_of(self._silos, agreed, modalities, cache, counts, first, whole)

    def record(self) -> AgreementRecord:
        """What was stated and agreed on, for the run folder."""
        return AgreementRecord.of(self._run, self.stated, self.agreed, self._included)


def _described(stated: DataStatement) -> str:
    """Modalities and numbers of items for a message: ``captions (train 0+0+285)``."""
    modalities = {IMAGE: "images", TEXT: "captions", IMAGE | TEXT: "pairs"}.get(stated.mask, "no modality")
    rows = zip(SPLITS, stated.counts.tolist(), strict=True)
    return f"{modalities} ({', '.join(f'{split} ' + '+'.join(map(str, row)) for split, row in rows if any(row))})"


def _check_consistent(name: str, statement: DataStatement, held: DataFormat) -> None:
    """Refuse a statement whose parts contradict each other, or of a silo without training items."""
    has = {"image": bool(statement.mask & IMAGE), "text": bool(statement.mask & TEXT)}
    said = {modality: getattr(held, f"{modality}_dtype") != "none" for modality in has}
    alone = [column for column, modality in ((1, "image"), (2, "text")) if not has[modality]]
    if has != said or not any(has.values()) or statement.counts[:, alone].any():
        raise RemoteWireError(Reason.UNEXPECTED, f"a statement of {name} whose parts contradict each other")
    if name != EVALUATOR and not statement.counts[SPLITS.index("train")].any():
        raise RemoteWireError(Reason.DATA, f"{name} has no training item")
