"""Checks before a run: what each one checks, the problem that it finds, and how to fix it.

A list of checks either refuses its subject at the first problem (:func:`refuse`), as the programs do when they start,
or reports every result (:func:`results`), as ``fedmq preflight`` does. :data:`SCENARIO` lists the checks of a scenario
file, which load neither torch nor an image; :mod:`fedmq.federation.participant` those of a silo that starts, and
``silos/preflight.py`` those of a silo before it joins a run. :mod:`fedmq.launch.preparation` checks a run's data, and
:mod:`fedmq.federation.preflight.data` describes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from fedmq.config import plug_ins
from fedmq.config.plug_ins import unknown
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


class Outcome(NamedTuple):
    """A verdict of a check, and one line for a reader."""

    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Check(Generic[S]):
    """A check before a run.

    Args:
        name: what is checked.
        fix: how to fix a problem.
        test: checks a subject; raises an error if there is a problem, and returns its other outcomes.
        needs: names of earlier checks; the check is left out if one of them failed.
    """

    name: str
    fix: str
    test: Callable[[S], Sequence[Outcome] | None]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Args:
        name: what was checked.
        verdict: whether there is a problem.
        detail: one line for a reader.
        fix: how to fix the problem; empty without one.
    """

    name: str
    verdict: Verdict
    detail: str
    fix: str = ""


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
@dataclass(frozen=True)
class Written:
    """A scenario whose data are on this machine, as it is written.

    Args:
        source: the scenario and its file.
        plug_ins: names of the methods and of the objectives, by scenario key.
    """

    source: Source
    plug_ins: Mapping[str, Collection[str]]


def _is_own_file(name: str) -> bool:
    return plug_ins.is_path(name) or plug_ins.is_reference(name)


def _plug_in(key: str, name: str, written: Written) -> None:
    if not _is_own_file(name) and name not in written.plug_ins[key]:
        raise unknown(key, name, written.plug_ins[key])


def _data(written: Written) -> None:
    data = written.source.scenario.data
    if data is None or _is_own_file(data.name):
        return
    catalogue.check(data)
    path = None if data.path is None else data.path.expanduser()
    if path is None:
        return
    allowed = f"an existing file or folder; docs/reference/data_sets.md shows the layout of {data.name}"
    if not os.path.lexists(path):  # a link that leads nowhere is refused later, with its reason
        raise InputError("data.path", str(data.path), allowed)
    if path.is_dir() and not any(files for _, _, files in os.walk(path, followlinks=True)):
        raise InputError("data.path", f"the folder {data.path}, which holds no file", allowed)


#: Checks of a scenario that take a fraction of a second.
SCENARIO: tuple[Check[Written], ...] = (
    Check(
        "method",
        "docs/reference/methods.md lists the methods",
        lambda written: _plug_in("protocol.name", written.source.scenario.protocol.name, written),
    ),
    Check(
        "objective",
        "docs/reference/methods.md lists the objectives",
        lambda written: _plug_in("objective.base", written.source.scenario.objective.base, written),
    ),
    Check("data on disk", "fedmq data list; then set data.name and data.path", _data),
)


def refuse_scenario(source: Source, plug_ins: Mapping[str, Collection[str]]) -> None:
    """Refuse an unknown method, objective or data set, and data that are not there.

    Raises:
        InputError: names file, line and key.
    """
    try:
        refuse(SCENARIO, Written(source, plug_ins))
    except InputError as error:
        raise InputError(source.place(error.place), error.found, error.allowed) from None
