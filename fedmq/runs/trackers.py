"""Experiment trackers: TensorBoard, MLflow, Weights & Biases, and CSV files, which follow a run.

Each receives a run's parameters, its metrics by version of the model, and its files. A thread follows
``metrics.jsonl``, so that neither the speed nor an error of a tracker affects the run. Nothing leaves the machine
unless the tracker's own environment variables say so (``MLFLOW_TRACKING_URI``, ``WANDB_MODE``), and the libraries'
reports about their own use are switched off.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import logging
import os
import re
import secrets
import shlex
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import override

from fedmq.config.resolve import ResolvedRun
from fedmq.config.run_id import flat
from fedmq.errors import FedmqError, InputError
from fedmq.packages import __version__, install_hint, package
from fedmq.runs.results import new_metrics, read_summary, with_own_figures
from fedmq.runs.run_records import EvaluationLine, MergeLine, MetricsLine, OwnHeldOutLine, PersonalLine
from fedmq.storage.json_files import Stored, read_json
from fedmq.storage.locks import locked
from fedmq.storage.regular_files import AppendedLines
from fedmq.storage.run_folder import RunFolder, write_json
from fedmq.text import csv_cell, printable

#: Project (W&B) and experiment (MLflow) of the runs, unless the libraries' environment variables name another one.
PROJECT = "fedmq"
_EXTRA = "trackers"
#: Package that each tracker needs.
_PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


class End(StrEnum):
    """How the tracked process ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Value:
    """A number of a line of ``metrics.jsonl``."""

    silo: str  # empty for the whole run
    name: str
    value: float

    @property
    def tag(self) -> str:
        """Name in trackers that have no column for the silo."""
        return f"{self.silo}/{self.name}" if self.silo else self.name


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker records at the start of a run."""

    folder: RunFolder
    id: str
    parameters: Mapping[str, object]
    rounds: int

    @property
    def name(self) -> str:
        """Name for display."""
        return self.folder.root.resolve().name

    def own_folder(self, tracker: str) -> Path:
        """The tracker's folder in the run folder."""
        path = self.folder.root / "trackers" / tracker
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def files(self) -> list[Path]:
        """Files to keep with the run, as far as they exist."""
        folder = self.folder
        return [path for path in (folder.scenario, folder.summary, folder.report) if path.is_file()]


class Tracker(ABC):
    """An open tracker, made with a run and the key of its tracked run if an earlier process has begun it.

    Attributes:
        key: identifies the tracker's run, so that a resumed run continues it.
        where: where the tracker writes to or how to look at it, for the user.
    """

    key: str
    where: str

    @abstractmethod
    def log(self, values: Sequence[Value], version: int, at: float) -> None:
        """Write the values of one line; ``version`` is the number of merges, ``at`` the real time [s since 1970]."""

    @abstractmethod
    def finish(self, end: End, result: Mapping[str, float]) -> None:
        """Write the files and, of a finished run, the metrics of its summary, and close the tracker's run."""


def values_of(line: MetricsLine) -> list[Value]:
    """The numbers of a line of ``metrics.jsonl``."""
    by_silo: Mapping[str, Mapping[str, float]]
    match line:
        case MergeLine():
            late = line.staleness
            numbers = {"replies": float(len(line.replies)), "run_seconds": line.now, **line.reported}
            numbers |= {} if line.loss is None else {"loss": line.loss}
            numbers |= {"staleness": sum(late) / len(late)} if late else {}
            whole, by_silo = _under("merge", numbers), {silo: {"loss": loss} for silo, loss in line.losses.items()}
        case EvaluationLine():
            whole, by_silo = _under("evaluation", line.metrics), line.per_silo
        case OwnHeldOutLine():
            whole = _under("own_heldout", line.metrics)
            by_silo = {silo: _under("own_heldout", measured.figures) for silo, measured in line.per_silo.items()}
        case PersonalLine():
            whole = _under("personal", line.personal)
            by_silo = {silo: _under("personal", measured) for silo, measured in line.personal_per_silo.items()}
    return [
        Value(silo, name, float(value))
        for silo, metrics in {"": whole, **by_silo}.items()
        for name, value in metrics.items()
    ]


def _under(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def check(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed.

    Raises:
        InputError: names the extra that installs it.
    """
    for name in names:
        if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
            raise InputError(f"track: {name}", f"package {_PACKAGES[name]} missing", install_hint(_EXTRA))


class CsvFiles(Tracker):
    """``parameters.csv``, ``metrics.csv`` with one row per number, and ``result.csv``."""

    def __init__(self, run: TrackedRun, key: str | None) -> None:
        self._folder = run.own_folder("csv")
        self.key, self.where = key or "csv", str(self._folder)
        _write_table(self._folder / "parameters.csv", ("key", "value"), run.parameters.items())
        path = self._folder / "metrics.csv"
        new = not path.exists()
        self._file = path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file)
        if new:
            self._rows.writerow(("wall", "version", "silo", "name", "value"))

    @override
    def log(self, values: Sequence[Value], version: int, at: float) -> None:
        self._rows.writerows((f"{at:.3f}", version, value.silo, value.name, value.value) for value in values)
        self._file.flush()

    @override
    def finish(self, end: End, result: Mapping[str, float]) -> None:
        self._file.close()
        if end is End.FINISHED:
            _write_table(self._folder / "result.csv", ("metric", "value"), result.items())


def _write_table(path: Path, head: Sequence[str], rows: Any) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(map(csv_cell, row) for row in rows)


class TensorBoard(Tracker):
    """Event files in ``trackers/tensorboard``; a resumed run adds another one."""

    def __init__(self, run: TrackedRun, key: str | None) -> None:
        package("tensorboard", _EXTRA, "track: tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        self._run, folder = run, run.own_folder("tensorboard")
        self.key, self.where = key or "tensorboard", f"tensorboard --logdir {shlex.quote(str(folder))}"
        self._writer = SummaryWriter(str(folder))
        if key is None:
            self._text("scenario", run.folder.scenario)

    @override
    def log(self, values: Sequence[Value], version: int, at: float) -> None:
        for value in values:
            self._writer.add_scalar(value.tag, value.value, version, walltime=at)
        self._writer.flush()

    @override
    def finish(self, end: End, result: Mapping[str, float]) -> None:
        """Keep the files as texts; the report stays in the run folder."""
        from torch.utils.tensorboard import summary  # noqa: PLC0415 - an extra

        if end is End.FINISHED:
            self._text("summary", self._run.folder.summary)
            metrics = {f"evaluation/{name}": value for name, value in result.items()}
            for proto in summary.hparams(dict(self._run.parameters), metrics):  # type: ignore[no-untyped-call]
                self._writer._get_file_writer().add_summary(proto)  # type: ignore[no-untyped-call]
        self._writer.close()

    def _text(self, name: str, path: Path) -> None:
        if path.is_file():
            self._writer.add_text(name, f"```\n{path.read_text(encoding='utf-8')}\n```")


#: Metrics that MLflow accepts in one call.
_BATCH = 1000
#: Parameters likewise.
_PARAMETERS = 100
_NOT_IN_MLFLOW = re.compile(r"[^\w\-./: ]")


class MLflow(Tracker):
    """A run of the experiment ``fedmq`` in the folder ``mlruns`` next to the run folder, or at MLFLOW_TRACKING_URI."""

    def __init__(self, run: TrackedRun, key: str | None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        # MLflow tries for minutes to reach a server that does not answer.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
        mlflow = package("mlflow", _EXTRA, "track: mlflow")
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        beside = run.folder.root.resolve().parent / "mlruns"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or beside.as_uri()
        self.where = f"MLflow at {uri}"
        self._run, self._client = run, mlflow.MlflowClient(uri)
        self._metric, self._param = mlflow.entities.Metric, mlflow.entities.Param
        if key is not None:
            self.key = key
            self._client.update_run(key, status="RUNNING")
            return
        # Several runs of a comparison start at once.
        with locked(beside / ".lock") if uri == beside.as_uri() else contextlib.nullcontext():
            experiment = self._experiment()
        tags = {"fedmq.run": run.id, "fedmq.folder": str(run.folder.root)}
        self.key = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        given = [self._param(name, str(value)) for name, value in run.parameters.items()]
        for start in range(0, len(given), _PARAMETERS):
            self._client.log_batch(self.key, params=given[start : start + _PARAMETERS])

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if known is None else known.experiment_id)

    @override
    def log(self, values: Sequence[Value], version: int, at: float) -> None:
        metrics = [
            self._metric(_NOT_IN_MLFLOW.sub("_", value.tag), value.value, int(at * 1000), version) for value in values
        ]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self.key, metrics=metrics[start : start + _BATCH])

    @override
    def finish(self, end: End, result: Mapping[str, float]) -> None:
        """Record the files and the result; a stopped run is KILLED until it is resumed."""
        for path in self._run.files:
            self._client.log_artifact(self.key, str(path))
        status = {End.FINISHED: "FINISHED", End.STOPPED: "KILLED", End.FAILED: "FAILED"}
        self._client.set_terminated(self.key, status[end])


#: W&B records the run's values and files only: nothing about the machine, the code or the packages.
_WANDB_SETTINGS: Mapping[str, object] = {
    "silent": True,
    "console": "off",
    **dict.fromkeys(("disable_git", "disable_code", "disable_job_creation", "x_disable_stats"), True),
    **dict.fromkeys(("x_disable_meta", "x_disable_machine_info"), True),
    "x_save_requirements": False,
    "init_timeout": 10.0,
}


class WeightsAndBiases(Tracker):
    """A run of the project ``fedmq``, offline in ``trackers/wandb`` unless WANDB_MODE says otherwise."""

    def __init__(self, run: TrackedRun, key: str | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        wandb = package("wandb", _EXTRA, "track: wandb")
        parent = run.own_folder("wandb").parent  # W&B appends its name
        self.key = key or secrets.token_hex(4)
        mode = os.environ.get("WANDB_MODE") or "offline"
        own = parent / "wandb" / f"offline-run-*-{self.key}"
        self.where = f"W&B, {mode}" + (f": wandb sync {shlex.quote(str(own.parent))}/{own.name}" * (mode == "offline"))
        self._run = run
        self._wandb = wandb.init(
            mode=mode,
            dir=str(parent),
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            id=self.key,
            resume="allow",
            config=dict(run.parameters),
            settings=wandb.Settings(**_WANDB_SETTINGS),
        )
        self._wandb.define_metric("version")
        self._wandb.define_metric("*", step_metric="version")

    @override
    def log(self, values: Sequence[Value], version: int, at: float) -> None:
        self._wandb.log({**{value.tag: value.value for value in values}, "version": version, "_timestamp": at})

    @override
    def finish(self, end: End, result: Mapping[str, float]) -> None:
        self._wandb.summary.update({f"result/{name}": value for name, value in result.items()})
        for path in self._run.files:
            copy = Path(self._wandb.dir) / path.name
            shutil.copyfile(path, copy)
            self._wandb.save(str(copy), base_path=self._wandb.dir, policy="now")
        self._wandb.finish(exit_code=1 if end is End.FAILED else 0)


Open = Callable[[TrackedRun, str | None], Tracker]
#: Opens a tracker, by the name that ``track`` lists.
TRACKERS: Mapping[str, Open] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "csv": CsvFiles,
}
#: Interval at which new lines are passed on [s].
_INTERVAL = 1.0
#: How long the end of a run waits for its trackers [s]: for those that are open, and for one that does not open.
_PATIENCE, _OPENING = 60.0, 15.0
_ALLOWED = "the state of a run's trackers"

Notice = Callable[[str], None]


class _Sent(Stored):
    """What a tracker has received."""

    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # of the tracker's run
    versions: dict[str, Annotated[int, Field(ge=-1)]]  # last version passed on, by kind of line


class _State(Stored):
    """``trackers/state.json``, by tracker."""

    trackers: dict[str, _Sent] = Field(default_factory=dict)


class _Follower:
    """Passes lines on in a separate thread."""

    def __init__(self, run: TrackedRun, names: tuple[str, ...], notice: Notice, trackers: Mapping[str, Open]) -> None:
        self._run, self._names, self._notice, self._openers = run, names, notice, trackers
        self._open: dict[str, Tracker] = {}
        self._sent: dict[str, _Sent] = {}
        self._lines = AppendedLines(run.folder.metrics)
        self._path = run.folder.root / "trackers" / "state.json"
        self._ended, self._opened, self._end = threading.Event(), threading.Event(), End.STOPPED
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)
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
                self._open[name] = self._openers[name](self._run, None if sent is None else sent.key)
                self._sent.setdefault(name, _Sent(key=self._open[name].key, versions={}))
        self._opened.set()
        self._save()
        over = False
        while not over:
            over = self._ended.wait(_INTERVAL)
            self._pass_on()
        result = self._result() if self._end is End.FINISHED else {}
        for name, tracker in list(self._open.items()):
            with self._contained(name):
                tracker.finish(self._end, result)
                self._notice(f"tracked: {tracker.where}")

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
        lines, _ = new_metrics(self._lines)
        for name, tracker in list(self._open.items()):
            versions = self._sent[name].versions
            with self._contained(name):
                for line in lines:
                    if line.version > versions.get(line.kind, -1):  # a resumed run repeats lines after its checkpoint
                        at = time.time() if line.wall is None else datetime.fromisoformat(line.wall).timestamp()
                        tracker.log(values_of(line), line.version, at)
                        versions[line.kind] = line.version
        if lines:
            self._save()

    def _save(self) -> None:
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

    The run is finished if the block ends with a summary in its folder, stopped if it ends without. ``notice`` is called
    with one line for each tracker that fails, and at the end with where the others write.

    Raises:
        InputError: a tracker's package is missing.
    """
    names = run.scenario.track
    check(names)
    if not names:
        yield
        return
    follower = _Follower(TrackedRun(folder, run.id, _parameters(run), run.scenario.rounds), names, notice, trackers)
    end = End.FAILED
    try:
        yield
        end = End.FINISHED if folder.summary.is_file() else End.STOPPED
    except (SystemExit, KeyboardInterrupt):
        end = End.STOPPED
        raise
    finally:
        follower.stop(end)


def _parameters(run: ResolvedRun) -> dict[str, object]:
    """Scenario keys with dots and their values, without those that are not set; lists as text."""
    keys = flat(run.scenario.model_dump(mode="json", exclude={"track"}))
    plain = {key: value if isinstance(value, bool | int | float) else str(value) for key, value in keys.items()}
    return {"fedmq": __version__, **{key: text for key, text in plain.items() if keys[key] not in (None, [], {})}}
