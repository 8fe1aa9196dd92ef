"""Evaluate the personal model of each silo on the held-out items of every silo.

Cross-site evaluation shows whether a personal model fits its own silo better than others' models do, and what a silo
would lose with the model of another one. All queries retrieve from the gallery of ``evaluation.silo_gallery``; with its
default, the whole split, chance is the same for all silos.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError
from fedmq.evaluation.heldout import HeldOut
from fedmq.retrieval.plots import evaluated_population
from fedmq.retrieval.released_model import Release
from fedmq.text import Progress, tell


@dataclass(frozen=True)
class CrossSite:
    """A metric of each personal model on each silo's held-out items."""

    models: tuple[str, ...]  # the S silos that have a personal model
    silos: tuple[str, ...]  # the T silos that have held-out items
    items: tuple[int, ...]  # their numbers of held-out items
    values: npt.NDArray[np.float64]  # [S, T], row: model, column: items
    without: dict[str, str]  # silos without a personal model, and why

    @property
    def own(self) -> float:
        """Mean of each model on its own silo's items; NaN if no silo has both."""
        found = [self.values[row, self.silos.index(name)] for row, name in enumerate(self.models) if name in self.silos]
        return float(np.mean(found)) if found else float("nan")

    @property
    def others(self) -> float:
        """Mean of each model on the items of all other silos; NaN if there is no other."""
        other = np.array([[model != silo for silo in self.silos] for model in self.models])
        return float(self.values[other].mean()) if other.any() else float("nan")


def measured(
    names: Sequence[str], opened: Callable[[str], Release], metric: str, progress: Progress | None = None
) -> CrossSite:
    """Evaluate the personal model of each silo, which ``opened`` opens, on the held-out items of all silos.

    Raises:
        InputError: no silo has a personal model, or the metric is not measured for silos.
    """
    rows: dict[str, list[float]] = {}
    failed: dict[str, InputError] = {}
    heldout, report = None, tell(progress, "models measured", len(names))
    for done, name in enumerate(names):
        report(done)
        try:
            release = opened(name)
        except InputError as error:
            failed[name] = error
            continue
        if heldout is None:
            population = evaluated_population(release)
            heldout = HeldOut.load(release.scenario, population)
        silos = [silo for silo, items in heldout.items.items() if len(items)]
        model = release.retriever(population.prepared)
        found = heldout.measured(model.encoders, binary=model.binary, names=silos).per_silo
        if metric not in found[silos[0]]:
            raise InputError("--metric", metric, f"one of {', '.join(found[silos[0]])}")
        rows[name] = [found[silo][metric] for silo in silos]
    report(len(names))
    if heldout is None:
        raise next(iter(failed.values()))
    counts = tuple(len(heldout.items[silo]) for silo in silos)
    without = {name: str(error) for name, error in failed.items()}
    return CrossSite(tuple(rows), tuple(silos), counts, np.array(list(rows.values())), without)
