"""Run and compare scenarios from Python: ``fedmq scenario`` and ``fedmq compare`` in separate processes.

A separate process works in scripts without ``if __name__ == "__main__"``, in notebooks and in programs with threads,
and leaves the caller's signal handlers and torch settings alone.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

import protocols
from fedmq.api.results import Run
from fedmq.config import yaml_files
from fedmq.config.plug_ins import UserFileError
from fedmq.config.resolve import read, resolve
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError, RunError
from fedmq.evaluation.metrics import BRIEF, metric_of
from fedmq.runs.results import gallery_of_status, meaningful, new_metrics
from fedmq.runs.resume import lacks_evaluation
from fedmq.runs.run_records import EvaluationLine, MergeLine, MetricsLine
from fedmq.runs.status import read_status
from fedmq.safe_console import SafeConsole
from fedmq.storage.regular_files import AppendedLines
from fedmq.storage.run_folder import RunFolder
from fedmq.text import print_line

if TYPE_CHECKING:
    import pandas as pd

OnMerge = Callable[[MergeLine], None]
OnEvaluation = Callable[[EvaluationLine], None]
#: Interval at which the run folder is read [s].
_INTERVAL = 0.1
#: Lines of the program's standard error that are kept for error messages.
_KEPT_LINES = 40
#: Sections that a name, a mapping, or a class from the user's own file replaces, as the options belong to the name.
_REPLACED = ("protocol", "objective")
#: Sections of which a name, or an object from the user's own file, changes only the name.
_NAMED = ("data", "backbone")


class StopRun(Exception):  # noqa: N818 - a request, not an error
    """Raise it in a callback to stop the run cleanly; :func:`resume` continues it."""


def run(
    scenario: str | os.PathLike[str] | Mapping[str, Any],
    out: str | os.PathLike[str] | None = None,
    *,
    on_merge: OnMerge | None = None,
    on_evaluation: OnEvaluation | None = None,
    progress: bool = True,
    **keys: Any,
) -> Run:
    """Run a scenario with all its silos as processes of this machine, and wait for its end.

    >>> run("scenarios/smoke.yaml", rounds=2, protocol="fedavg").summary.metrics["mean_r1"]  # doctest: +SKIP

    Args:
        scenario: a scenario file, or a scenario as a mapping, whose relative paths start at the working directory.
        out: the run folder, which must be new; ``runs/<name>-<time>`` by default.
        on_merge: called in this process after each merge.
        on_evaluation: called in this process after each evaluation of the shared model.
        progress: show a progress bar.
        **keys: scenario keys that override the file's, e.g. ``rounds=20, protocol="rcsr", partition={"alpha": 0.5}`` or
            ``**{"partition.alpha": 0.5}``. ``protocol`` also accepts a class, and ``data`` or ``objective`` an object,
            that your own Python file defines.

    Returns:
        The run. It is not finished if a callback raised :class:`StopRun`.

    Raises:
        InputError: the scenario is invalid, or the folder exists.
        RunError: the run failed; the message holds what the program reported.
        KeyboardInterrupt: it was interrupted, after the processes have stopped cleanly; :func:`resume` continues it.
    """
    with contextlib.ExitStack() as closing:
        file = closing.enter_context(_as_file(scenario))
        _check_keys(keys)
        settings = settings_of(keys)
        try:
            resolved = resolve(read(file, settings), protocols).scenario
        except UserFileError:
            raise  # the place is the user's file
        except InputError as error:  # here the user has given keywords, no option --set
            raise InputError(error.place.replace(": --set ", ": "), error.found, error.allowed) from None
        folder = _new_folder(resolved, out)
        command = ["scenario", str(file), "--out", str(folder), *_options(settings)]
        _watch(command, folder, resolved, progress=progress, on_merge=on_merge, on_evaluation=on_evaluation)
    return Run(folder)


def resume(
    folder: str | os.PathLike[str],
    *,
    on_merge: OnMerge | None = None,
    on_evaluation: OnEvaluation | None = None,
    progress: bool = True,
) -> Run:
    """Continue a run that was stopped, or whose last version is not evaluated.

    Arguments, result and errors are those of :func:`run`. The callbacks receive the merges and evaluations from the
    last checkpoint on.
    """
    stopped = Run(folder)
    if stopped.finished and not lacks_evaluation(RunFolder(stopped.folder)):
        raise InputError(str(stopped.folder), "a finished run", "a run that was stopped, or not evaluated at its end")
    file = stopped.folder / "scenario.yaml"
    resolved = resolve(read(file), protocols, adopt=False).scenario
    command = ["scenario", str(file), "--resume", str(stopped.folder)]
    _watch(command, stopped.folder, resolved, progress=progress, on_merge=on_merge, on_evaluation=on_evaluation)
    return Run(folder)


def _check_keys(keys: Mapping[str, Any]) -> None:
    """Refuse a function: it is not the value of a scenario key, but a callback under a wrong name."""
    for name, value in keys.items():
        if callable(value) and not isinstance(value, type) and inspect.isroutine(value):
            raise InputError(name, "a function", "on_merge or on_evaluation, or a scenario key and its value")


def settings_of(keys: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Scenario keys as settings in the form of ``--set``; mappings give one setting for each of their keys."""
    settings: list[str] = []
    for key, value in keys.items():
        path = f"{prefix}{key}"
        if path in _REPLACED:
            section = value if isinstance(value, Mapping | str | None) else _file_of(path, value)
            settings.append(f"{path}={json.dumps(_plain(section))}")
        elif isinstance(value, Mapping):
            settings += settings_of(value, f"{path}.")
        elif path in _NAMED:
            name = value if isinstance(value, str) else _file_of(path, value)
            settings.append(f"{path}.name={json.dumps(name)}")
        else:
            settings.append(f"{path}={json.dumps(_plain(value))}")
    return settings


def _plain(value: Any) -> Any:
    """The value for YAML: paths as text, NumPy numbers as numbers, tuples as lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def _file_of(place: str, value: object) -> str:
    """The Python file that defines a class or the class of an object."""
    kind = value if isinstance(value, type) else type(value)
    path = None
    if kind.__module__ != "__main__":  # the program that calls this function must not be executed again
        with contextlib.suppress(TypeError):
            path = inspect.getsourcefile(kind)
    if path is None or not Path(path).is_file():
        allowed = "one defined in a separate file; in a notebook, write the cell with %%writefile mine.py"
        raise InputError(place, f"{kind.__name__}, defined in the main program", allowed)
    return str(Path(path).resolve())


@contextlib.contextmanager
def _as_file(scenario: str | os.PathLike[str] | Mapping[str, Any]) -> Iterator[Path]:
    if not isinstance(scenario, Mapping):
        yield Path(scenario)
        return
    # In the working directory, at which the relative paths of the mapping start.
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix=".fedmq-", dir=Path.cwd(), encoding="utf-8") as file:
        file.write(yaml_files.dump(dict(scenario)))
        file.flush()
        yield Path(file.name)


def _new_folder(scenario: Scenario, out: str | os.PathLike[str] | None) -> Path:
    if out is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        return Path("runs") / f"{scenario.name}-{stamp}"
    folder = Path(out).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"out {folder}", "a folder that is not empty", "a new folder; fedmq.resume continues a run")
    return folder


def _options(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _watch(
    arguments: Sequence[str],
    folder: Path,
    scenario: Scenario,
    *,
    progress: bool,
    on_merge: OnMerge | None,
    on_evaluation: OnEvaluation | None,
) -> None:
    """Start the program and report its merges and evaluations until it ends."""
    command = [sys.executable, "-m", "fedmq", *arguments, "--quiet", "--json"]
    metrics, old = folder / "metrics.jsonl", 0
    if metrics.is_file() and "--resume" in arguments:
        old = metrics.stat().st_size
    # A separate session, so that an interrupt of this process reaches it once, through this process.
    process = subprocess.Popen(  # noqa: S603 - the program is this package
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    output: deque[str] = deque(maxlen=_KEPT_LINES)
    assert process.stderr is not None  # noqa: S101 - a pipe was requested
    reader = Thread(target=_collect, args=(process.stderr, output), daemon=True)
    reader.start()
    stopped: BaseException | None = None
    with _bar(scenario, shown=progress) as show:
        try:
            for line in _lines(metrics, old, process):
                show(_shown(line, folder))
                if on_merge is not None and isinstance(line, MergeLine):
                    on_merge(line)
                if on_evaluation is not None and isinstance(line, EvaluationLine):
                    on_evaluation(line)
        except BaseException as error:
            stopped = error
            _stop(process)
    reader.join(5.0)
    if stopped is not None and not isinstance(stopped, StopRun):
        if not (folder / "summary.json").is_file():
            stopped.add_note(f"fedmq: the run was stopped; fedmq.resume({str(folder)!r}) continues it")
        raise stopped
    if process.returncode != 0 and stopped is None:
        text = "\n".join(output).strip() or f"fedmq scenario ended with exit code {process.returncode}"
        raise RunError(text)


def _collect(pipe: IO[bytes], output: deque[str]) -> None:
    for line in pipe:
        output.append(line.decode("utf-8", "replace").rstrip())


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the program cleanly; a second interrupt ends it immediately."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()


def _lines(path: Path, old: int, process: subprocess.Popen[bytes]) -> Iterator[MetricsLine]:
    """Lines of ``metrics.jsonl`` after its first ``old`` bytes, until the program has ended and all were read."""
    appended = AppendedLines(path, old)
    while True:
        ended = process.poll() is not None
        lines, cut = new_metrics(appended)
        if not cut:  # a resumed run first cuts off the lines after its checkpoint
            yield from lines
        if ended:
            return
        time.sleep(_INTERVAL)


@contextlib.contextmanager
def _bar(scenario: Scenario, *, shown: bool) -> Iterator[Callable[[MetricsLine], None]]:
    if not shown:
        yield lambda _: None
        return
    if in_notebook():
        yield notebook_bar(scenario.name, scenario.rounds)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("round {task.completed} of {task.total}"),
        TextColumn("{task.fields[metrics]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=SafeConsole()) as bar:
        task: TaskID = bar.add_task(scenario.name, total=scenario.rounds, metrics="starting the silos")

        def show(line: MetricsLine) -> None:
            if isinstance(line, MergeLine):
                bar.update(task, completed=line.version)
            elif isinstance(line, EvaluationLine):
                bar.update(task, metrics=brief(line))

        yield show


def _shown(line: MetricsLine, folder: Path) -> MetricsLine:
    """A line for display: without recalls that every model reaches in so small a gallery."""
    if isinstance(line, EvaluationLine):
        with contextlib.suppress(InputError):
            gallery = gallery_of_status(read_status(RunFolder(folder).status))
            return line.model_copy(update={"metrics": meaningful(line.metrics, gallery)})
    return line


def brief(line: EvaluationLine) -> str:
    """The most important metrics of an evaluation, and its round."""
    text = ", ".join(f"{metric_of(name).heading} {line.metrics[name]:.3f}" for name in BRIEF if name in line.metrics)
    return f"{text} (of round {line.version})"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def notebook_bar(name: str, rounds: int) -> Callable[[MetricsLine], None]:
    """Show a progress bar below the cell."""
    from IPython.display import HTML, display  # noqa: PLC0415 - there only in a notebook

    done, text = 0, "starting the silos"

    def shown() -> Any:
        bar = f"<progress max='{rounds}' value='{done}'></progress>"
        return HTML(f"{escape(name)} {bar} round {done} of {rounds} {escape(text)}")

    handle = display(shown(), display_id=True)

    def show(line: MetricsLine) -> None:
        nonlocal done, text
        if isinstance(line, MergeLine):
            done = line.version
            text = "" if text == "starting the silos" else text
        elif isinstance(line, EvaluationLine):
            text = brief(line)
        handle.update(shown())

    return show


#: Lines of a comparison that an error repeats if none names a reason.
_LAST_LINES = 20


class Comparison:
    """The folder of a comparison.

    Args:
        folder: with ``table.csv``, ``runs.csv`` and ``plots.html``.

    Raises:
        InputError: it holds no comparison.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not (self.folder / "table.csv").is_file():
            raise InputError(str(folder), "no table.csv in it", "the folder of a finished comparison")

    @property
    def table(self) -> pd.DataFrame:
        """A row for each scenario or method: mean, spread, and paired difference to the baseline."""
        import pandas as pd  # noqa: PLC0415 - only data frames need it

        return pd.read_csv(self.folder / "table.csv")

    @property
    def runs(self) -> pd.DataFrame:
        """A row for each run."""
        import pandas as pd  # noqa: PLC0415

        return pd.read_csv(self.folder / "runs.csv")

    @property
    def plots(self) -> Path:
        """``plots.html``."""
        return self.folder / "plots.html"

    def __repr__(self) -> str:
        return f"<fedmq comparison {self.folder}: {len(self.table)} rows>"

    def _repr_html_(self) -> str:
        table = self.table
        shown = {"name": table["name"].tolist()}
        for metric in [str(name).removesuffix(".mean") for name in table if str(name).endswith(".mean")]:
            parts = table.reindex(columns=[f"{metric}.{part}" for part in ("mean", "std", "difference", "low", "high")])
            cells = [[*map(_figure, row)] for row in parts.to_numpy(float)]
            shown[metric] = [f"{mean} ± {std}" if std else mean for mean, std, *_ in cells]
            shown[f"{metric}: difference"] = [f"{at} [{low}, {high}]" if low else at for _, _, at, low, high in cells]
        return str(type(table)(shown).to_html(index=False))


def _figure(value: float) -> str:
    return "" if value != value else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"  # noqa: PLR0124 - NaN


def compare(
    scenarios: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    vary: Mapping[str, Sequence[Any]] | None = None,
    metrics: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **keys: Any,
) -> Comparison:
    """Compare scenarios or methods on equal terms, over the same seeds.

    Finished runs are kept in the folder: the same call continues a comparison that was interrupted.

    >>> compare("scenarios/smoke.yaml", vary={"protocol": ["fedavg", "rcsr"]}, seeds=[0, 1])  # doctest: +SKIP

    Args:
        scenarios: scenario files, or one comparison file.
        seeds: seeds of the runs; each row runs with all of them.
        vary: values by scenario key; all combinations become rows.
        metrics: columns of the table, e.g. ``["mean_r1", "bytes.up"]``.
        out: folder of the results; ``runs/compare-<time>`` by default.
        progress: show the program's progress on standard error.
        **keys: scenario keys that override those of all files, as in :func:`fedmq.run`.

    Raises:
        RunError: an input was refused, or a run failed; the message holds what the program reported.
        KeyboardInterrupt: it was interrupted, after the processes have stopped.
    """
    files = [scenarios] if isinstance(scenarios, str | os.PathLike) else list(scenarios)
    folder = Path(out) if out is not None else Path("runs") / f"compare-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    command = [sys.executable, "-m", "fedmq", "compare", *map(str, files), "--out", str(folder)]
    command += ["--seeds", ",".join(map(str, seeds))]
    for key, values in (vary or {}).items():
        plain = [setting.partition("=")[2] for value in values for setting in settings_of({f".{key}": value})]
        command += ["--vary", f"{key}={','.join(plain)}"]
    if metrics is not None:
        command += ["--metric", ",".join(metrics)]
    command += _options(settings_of(keys))
    # On a terminal the program itself draws its progress line there; elsewhere its lines are passed on and kept.
    errors = None if progress and sys.stderr.isatty() else subprocess.PIPE
    process = subprocess.Popen(  # noqa: S603 - the program is this package
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, text=True, start_new_session=True
    )
    said: list[str] = []
    try:
        for line in process.stderr or ():
            said.append(line.rstrip())
            if progress:
                print_line(said[-1], error=True)
        process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if process.returncode != 0:
        reasons = [line for line in said if line.startswith(("fedmq: ", "failed "))]
        text = "\n".join(reasons or said[-_LAST_LINES:]).strip()
        raise RunError(text or f"fedmq compare ended with exit code {process.returncode}, see above")
    return Comparison(folder)
