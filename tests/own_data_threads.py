"""Silos with data of their own as threads of one process over memory://, with real sealed messages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.program import CoordinatorArguments, CoordinatorResult, run_coordinator
from fedmq.config.scenario import Data, Scenario
from fedmq.config.site import Site
from fedmq.errors import FedmqError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.runs.status import Status
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.keys import init_keys
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind, Message
from silos.program import run_silo
from silos.schedule import AgreedSchedule
from silos.tasks import SiloArguments
from tests.log_causes import check_causes
from tests.own_data_sites import COMMON, HOSPITALS, IMAGE_ONLY, arrays, of_hospital
from tests.threaded_run import run_of
from tests.waiting import PATIENCE, memory_uri

_NUMBERS = itertools.count()
_SECONDS = 20.0


@dataclass
class OwnRun:
    """A run of the three hospitals' sites.

    Args:
        root: folder for everything.
        more: keys of the scenario.
        data: arrays of a site instead of those of its hospital, by silo; those of the evaluator.
        sets: data sets of the silos instead of arrays, in their order.
        ended: why a silo ended, by name; empty if the coordinator stopped it.
        policies: files of silos' policies, by name.
        uri: where the coordinator listens; empty for one within this process.

    Attributes:
        started: names of the silos that were started, and of the evaluator.
        statuses: what the coordinator reported to its display.
    """

    root: Path
    more: Mapping[str, Any] = field(default_factory=dict)
    data: dict[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    uri: str = ""
    sets: Sequence[Data] = ()
    policies: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scenario = Scenario.model_validate({"name": "own", **COMMON, "partition": {"kind": "own"}, **self.more})
        self.uri = self.uri or memory_uri()
        self.run = run_of(self.scenario)
        self.started, self.statuses = set[str](), list[Status]()
        self._threads: list[threading.Thread] = []
        init_keys(self.root / "keys", ("coordinator", EVALUATOR, *self.scenario.silo_names))

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / "run")

    def site(self, name: str) -> Site:
        """A site with its data in a file, or with its data set."""
        if self.sets:
            return Site(name=name, data=self.sets[self.scenario.silo_names.index(name)], file=Path("silo.yaml"))
        found = self.data.get(name)
        if found is None:
            found = of_hospital(arrays(), HOSPITALS[self.scenario.silo_names.index(name)])
        path = self.root / f"{name}-{next(_NUMBERS)}.npz"
        np.savez(path, **found)
        only: Any = ("image",) if name == IMAGE_ONLY else None
        return Site(name=name, data=Data(name="features", path=path), modalities=only, file=Path("silo.yaml"))

    def start(self, *names: str) -> None:
        """Start silos, or the evaluator."""
        self.started.update(names)
        for name in names:
            thread = threading.Thread(target=self._live, args=(name, self.site(name)), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _live(self, name: str, site: Site) -> None:
        keys, out = self.root / "keys", self.root / "run"
        try:
            if name == EVALUATOR:
                run_evaluator(EvaluatorArguments(self.run, self.uri, keys, out, site=site))
            else:
                policy = self.policies.get(name)
                run_silo(SiloArguments(self.run, name, self.uri, keys, out, site=site, policy=policy))
            self.ended[name] = ""
        except FedmqError as error:
            self.ended[name] = str(error)

    def coordinate(
        self, *, listening: Callable[[], None] = lambda: None, stop_wanted: Callable[[], bool] = lambda: False
    ) -> CoordinatorResult:
        """Run the coordinator, then wait for the others."""
        arguments = CoordinatorArguments(
            self.run, self.uri, self.root / "keys", self.root / "run", stop_silos=True, report=True
        )
        try:
            outcome = run_coordinator(
                arguments, listening=lambda _: listening(), stop_wanted=stop_wanted, status=self.statuses.append
            )
        finally:
            self.wait()
        check_causes(self.root / "run")
        return outcome

    def wait(self) -> None:
        """Wait until silos and evaluator have ended."""
        for thread in self._threads:
            thread.join(_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads)

    @property
    def merges(self) -> list[MergeLine]:
        """The merges so far."""
        return [line for line in read_metrics(self.folder) if isinstance(line, MergeLine)]

    def stated(self, name: str) -> int:
        """Number of statements of a silo that the coordinator has received."""
        log = self.folder.messages(COORDINATOR)
        return sum(
            isinstance(record, MessageRecord) and record.header.kind is Kind.STATEMENT and record.header.sender == name
            for _, record in (read_log(log) if log.is_file() else ())
        )

    def from_version(self, version: int, name: str, others: threading.Event) -> Callable[[], bool]:
        """Start a silo when a version is merged; the ``others`` answer no task until it has stated its data."""
        started = stated = False

        def check() -> bool:
            nonlocal started, stated
            if not started and len(self.merges) >= version:
                started = True
                others.clear()
                self.start(name)
            if started and not stated and self.stated(name) > 0:
                stated = True
                others.set()
            return False

        return check


def answers_of_others(monkeypatch: pytest.MonkeyPatch, late: str) -> threading.Event:
    """An event; while it is not set, all silos but the late one wait before they work on a task."""
    others, check = threading.Event(), AgreedSchedule.check

    def wait(schedule: AgreedSchedule, message: Message) -> None:
        check(schedule, message)
        assert threading.current_thread().name == late or others.wait(PATIENCE)

    monkeypatch.setattr(AgreedSchedule, "check", wait)
    others.set()
    return others
