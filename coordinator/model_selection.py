"""Selection by evaluations of the validation split: the best version, and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from coordinator.run_context import RunContext
from fedmq.evaluation.metrics import HEADLINE
from fedmq.federation.protocol import State
from fedmq.runs.run_records import BestVersion, EvaluationLine, MetricsLine
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, write_json
from fedmq.wire.payloads import Metrics


def patience_over(lines: Iterable[MetricsLine], patience: int | None) -> bool:
    """Whether the last evaluations had no higher mean R@1 than one before them.

    Args:
        lines: lines of ``metrics.jsonl``.
        patience: number of evaluations; None is never over.
    """
    if patience is None:
        return False
    evaluated = {line.version: line.metrics[HEADLINE] for line in lines if isinstance(line, EvaluationLine)}
    values = [evaluated[version] for version in sorted(evaluated)]
    return bool(values) and len(values) - 1 - values.index(max(values)) >= patience


class BestModel:
    """Keeps the version with the highest mean R@1 in ``best/`` of the run folder; the earliest of equal ones.

    Args:
        run_context: fixed facts of the run.
        write: writes the released model of a state into a run folder; returns the model's digest.

    Raises:
        InputError: the record of an earlier process is damaged.
    """

    def __init__(self, run_context: RunContext, write: Callable[[RunFolder, State], str]) -> None:
        self._folder, self._write = run_context.folder, write
        self.best = read_best(self._folder)

    @property
    def _path(self) -> Path:
        return best_path(self._folder)

    def evaluated(self, version: int, metrics: Metrics, state: State) -> None:
        """Keep a version if it is the best one so far.

        Args:
            version: number of merges.
            metrics: metrics on the validation split.
            state: the method's state at that version.
        """
        value = metrics.values[HEADLINE]
        if self.best is not None and value <= self.best.value:
            return
        digest = self._write(RunFolder(self._path.parent), state)
        self.best = BestVersion(version=version, metric=HEADLINE, value=value, model_digest=digest)
        write_json(self._path, self.best.plain())


def best_path(folder: RunFolder) -> Path:
    """The record of the best version; its model is in ``model/`` next to it."""
    return folder.root / "best" / "best.json"


def read_best(folder: RunFolder) -> BestVersion | None:
    """The best version of a run; None if none is kept.

    Raises:
        InputError: its record is damaged.
    """
    path = best_path(folder)
    return read_json(path, BestVersion, "the record of a run's best version") if path.exists() else None
