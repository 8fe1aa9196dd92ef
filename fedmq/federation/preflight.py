"""Checks before a run: what each one checks, the problem, and how to fix it.

:mod:`fedmq.launch.preflight` has the list. A program that starts refuses the first problem (:func:`refuse`);
``fedmq preflight`` and ``fedmq scenario --check`` report every result (:func:`results`). The checks of a scenario file,
:data:`SCENARIO`, are here, as they load neither torch nor an image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from typing import Generic, NamedTuple, TypeVar

from fedmq.config import plug_ins
from fedmq.config.resolve import Source
from fedmq.data import catalogue
from fedmq.errors import FedmqError, InputError

S = TypeVar("S")


class Verdict(StrEnum):
    """Result of a check."""

    OK = "ok"
    DIFFERS = "differs"  # the run can go on, but the reader should know
    WARNING = "warning"  # the run can go on, but with fewer usable items, or other content, than intended
    SKIPPED = "skipped"  # not possible, e.g. because the coordinator is not running yet
    FAILED = "failed"


class Program(Flag):
    """A program that makes checks before it starts, or instead."""

    SCENARIO = auto()
    COORDINATOR = auto()
    SILO = auto()
    EVALUATOR = auto()
    PREFLIGHT = auto()
    CHECK = auto()  # fedmq scenario --check


class Outcome(NamedTuple):
    """A verdict of a check, and one line for a reader."""

    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Check(Generic[S]):
    """A check before a run."""

    name: str
    fix: str  # how to fix a problem
    # Checks a subject; raises an error if there is a problem, and returns its other outcomes.
    test: Callable[[S], Sequence[Outcome] | None]
    needs: tuple[str, ...] = ()  # names of earlier checks; the check is left out if one of them failed
    programs: Program = Program.PREFLIGHT  # those that make it


@dataclass(frozen=True)
class Result:
    """The result of a check."""

    name: str
    verdict: Verdict  # whether there is a problem
    detail: str  # one line for a reader
    fix: str = ""  # how to fix the problem; empty without one


def refuse(checks: Sequence[Check[S]], subject: S) -> None:
    """Run checks until one finds a problem.

    Raises:
        FedmqError: the problem.
    """
    for check in checks:
        check.test(subject)


def results(checks: Sequence[Check[S]], subject: S) -> Iterator[Result]:
    """Run all checks whose needs are met, one after the other."""
    failed = set[str]()
    for check in checks:
        if not failed.isdisjoint(check.needs):
            failed.add(check.name)
            continue
        try:
            outcomes = check.test(subject) or ()
        except FedmqError as error:
            outcomes = (Outcome(Verdict.FAILED, str(error)),)
        for verdict, detail in outcomes:
            if verdict is Verdict.FAILED:
                failed.add(check.name)
            yield Result(check.name, verdict, detail, "" if verdict is Verdict.OK else check.fix)


# --- what a scenario file says --------------------------------------------------------------------------------------
#: Where the plug-ins that a scenario key selects are found: package and entry point group.
_PLUG_INS = {
    "protocol.name": ("protocols", "fedmq.protocols"),
    "objective.base": ("protocols.objectives", "fedmq.objectives"),
}


def plug_in_names(key: str) -> tuple[str, ...]:
    """Names of the methods, objectives or data sets that a scenario key selects from; loads none of them, nor torch."""
    return catalogue.names() if key == "data.name" else plug_ins.names_found(*_PLUG_INS[key])


def _is_own_file(name: str) -> bool:
    return plug_ins.is_path(name) or plug_ins.is_reference(name)


def _plug_in(key: str, name: str) -> None:
    if not _is_own_file(name) and name not in (names := plug_in_names(key)):
        raise plug_ins.unknown(key, name, names)


def _data(source: Source) -> None:
    data = source.scenario.data
    if data is None or _is_own_file(data.name):
        return
    _plug_in("data.name", data.name)
    path = None if data.path is None else data.path.expanduser()
    if path is None:
        return
    allowed = f"an existing file or folder; docs/reference/data_sets.md shows the layout of {data.name}"
    if not os.path.lexists(path):  # a link that leads nowhere is refused later, with its reason
        raise InputError("data.path", str(data.path), allowed)
    if path.is_dir() and not any(files for _, _, files in os.walk(path, followlinks=True)):
        raise InputError("data.path", f"the folder {data.path}, which holds no file", allowed)


def _of_file(name: str, fix: str, test: Callable[[Source], None]) -> Check[Source]:
    """A check of a scenario file, of which an error names file, line and key."""

    def placed(source: Source) -> None:
        try:
            test(source)
        except InputError as error:
            raise InputError(source.place(error.place), error.found, error.allowed) from None

    return Check(name, fix, placed)


#: Checks of a scenario that take a fraction of a second.
SCENARIO = (
    _of_file(
        "method",
        "docs/reference/methods.md lists the methods",
        lambda source: _plug_in("protocol.name", source.scenario.protocol.name),
    ),
    _of_file(
        "objective",
        "docs/reference/methods.md lists the objectives",
        lambda source: _plug_in("objective.base", source.scenario.objective.base),
    ),
    _of_file("data on disk", "fedmq data list; then set data.name and data.path", _data),
)


def refuse_scenario(source: Source) -> None:
    """Refuse an unknown method, objective or data set, and data that are not there.

    Raises:
        InputError: names file, line and key.
    """
    refuse(SCENARIO, source)
