"""Pass a run's records on to experiment trackers during the run.

A thread follows ``metrics.jsonl``, so that neither the speed nor an error of a tracker affects the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated

from pydantic import Field, ValidationError

from fedmq.config.resolve import ResolvedRun
from fedmq.config.run_id import flat
from fedmq.errors import FedmqError, InputError
from fedmq.packages import __version__
from fedmq.runs.results import read_summary, with_own_figures
from fedmq.runs.run_records import AnyMetricsLine, MetricsLine
from fedmq.runs.trackers import TRACKERS, End, Open, TrackedRun, Tracker, check, values_of
from fedmq.storage.json_files import Stored, read_json
from fedmq.storage.regular_files import AppendedLines
from fedmq.storage.run_folder import RunFolder, write_json
from fedmq.text import printable

#: Interval at which new lines are passed on [s].
_INTERVAL = 1.0
#: How long the end of a run waits for its trackers [s]: for those that are open, and for one that does not open.
_PATIENCE, _OPENING = 60.0, 15.0
_ALLOWED = "the state of a run's trackers"

Notice = Callable[[str], None]


class _Sent(Stored):
    """What a tracker has received.

    Args:
        key: key of the tracker's run.
        versions: last version passed on, by kind of line.
    """

    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    versions: dict[str, Annotated[int, Field(ge=-1)]] = Field(default_factory=dict)


class _State(Stored):
    """``trackers/state.json``, by tracker."""

    trackers: dict[str, _Sent] = Field(default_factory=dict)


@dataclass
class _Open:
    """An open tracker, and the lines that it has received, by kind and version."""

    tracker: Tracker
    earlier: Mapping[str, int]
    done: set[tuple[str, int]] = field(default_factory=set)

    def is_new(self, line: MetricsLine) -> bool:
        """Whether it has not received a line; a resumed run writes lines after its checkpoint again."""
        known = line.version <= self.earlier.get(line.kind, -1) or (line.kind, line.version) in self.done
        return not known

    @property
    def sent(self) -> _Sent:
        """What it has received."""
        last = dict(self.earlier)
        for kind, version in self.done:
            last[kind] = max(version, last.get(kind, -1))
        return _Sent(key=self.tracker.key, versions=last)


class _Follower:
    """Passes lines on in a separate thread."""

    def __init__(self, run: TrackedRun, names: tuple[str, ...], notice: Notice, trackers: Mapping[str, Open]) -> None:
        self._run, self._names, self._notice, self._openers = run, names, notice, trackers
        self._open: dict[str, _Open] = {}
        self._sent: dict[str, _Sent] = {}
        self._lines = AppendedLines(run.folder.metrics)
        self._path = run.folder.root / "trackers" / "state.json"
        self._ended, self._opened, self._end = threading.Event(), threading.Event(), End.STOPPED
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, end: End) -> None:
        """Pass on the last lines and the result, and wait for the trackers, up to a limit."""
        self._end = end
        self._ended.set()
        patience = _PATIENCE if self._opened.wait(_OPENING) else 0.0
        self._thread.join(patience)
        if self._thread.is_alive():
            waiting = ", ".join(self._names)
            what = f"not finished after {patience:.0f} s" if patience else f"not reached {_OPENING:.0f} s after the end"
            self._notice(f"track: {waiting}: {what}; the run is complete without it")

    def _follow(self) -> None:
        self._sent = self._earlier()
        for name in self._names:
            sent = self._sent.get(name)
            with self._contained(name):
                opened = self._openers[name](self._run, None if sent is None else sent.key)
                self._open[name] = _Open(opened, {} if sent is None else sent.versions)
        self._opened.set()
        self._save()
        while True:
            over = self._ended.wait(_INTERVAL)
            self._pass_on()
            if over:
                break
        result = self._result() if self._end is End.FINISHED else {}
        for name, tracked in list(self._open.items()):
            with self._contained(name):
                tracked.tracker.finish(self._end, result)
                self._notice(f"tracked: {tracked.tracker.where}")

    def _earlier(self) -> dict[str, _Sent]:
        if not self._path.is_file():
            return {}
        try:
            earlier, rounds = read_json(self._path, _State, _ALLOWED).trackers, self._run.rounds
            for name, sent in earlier.items():
                if (last := max(sent.versions.values(), default=0)) > rounds:
                    raise InputError(f"{self._path}: {name}", f"version {last} of {rounds}", _ALLOWED)
            return dict(earlier)
        except InputError as error:
            self._notice(f"{error}; the trackers start a new run")
            return {}

    def _pass_on(self) -> None:
        lines = []
        for text in self._lines.new()[0]:
            with contextlib.suppress(ValidationError):
                lines.append(AnyMetricsLine.model_validate_json(text).root)
        if not lines:
            return
        for name, opened in list(self._open.items()):
            with self._contained(name):
                for line in filter(opened.is_new, lines):
                    at = time.time() if line.wall is None else datetime.fromisoformat(line.wall).timestamp()
                    opened.tracker.log(values_of(line), line.version, at)
                opened.done |= {(line.kind, line.version) for line in lines}
        self._save()

    def _save(self) -> None:
        self._sent |= {name: opened.sent for name, opened in self._open.items()}
        with contextlib.suppress(OSError, FedmqError):
            write_json(self._path, _State(trackers=self._sent).plain())

    def _result(self) -> dict[str, float]:
        with contextlib.suppress(InputError):
            return dict(with_own_figures(read_summary(self._run.folder)).metrics)
        return {}

    @contextlib.contextmanager
    def _contained(self, name: str) -> Iterator[None]:
        """Give up a tracker that fails, with one line; the run continues without it."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            first = next(iter(str(error).splitlines()), "") or type(error).__name__
            self._notice(f"track: {name}: {printable(first)[:300]}; the run continues without it")


@contextlib.contextmanager
def tracking(
    run: ResolvedRun, folder: RunFolder, notice: Notice, trackers: Mapping[str, Open] = TRACKERS
) -> Iterator[None]:
    """Pass a run's records on to the trackers that its scenario lists, while the block runs.

    The run is finished if the block ends with a summary in its folder, stopped if it ends without.

    Args:
        run: the run.
        folder: the run folder.
        notice: called with one line for each tracker that fails, and at the end with where the others write.
        trackers: functions that open trackers, by name.

    Raises:
        InputError: a tracker's package is missing.
    """
    names = run.scenario.track
    check(names)
    if not names:
        yield
        return
    follower = _Follower(TrackedRun(folder, run.id, parameters_of(run), run.scenario.rounds), names, notice, trackers)
    follower.start()
    end = End.FAILED
    try:
        yield
        end = End.FINISHED if folder.summary.is_file() else End.STOPPED
    except (SystemExit, KeyboardInterrupt):
        end = End.STOPPED
        raise
    finally:
        follower.stop(end)


def parameters_of(run: ResolvedRun) -> dict[str, object]:
    """Scenario keys with dots and their values, without those that are not set; lists as text."""
    parameters: dict[str, object] = {"fedmq": __version__}
    for key, value in flat(run.scenario.model_dump(mode="json", exclude={"track"})).items():
        if isinstance(value, bool | int | float | str):
            parameters[key] = value
        elif value:
            parameters[key] = str(value)
    return parameters
