"""Estimates of ``fedmq scenario --check`` compared with runs: time, memory and traffic of several scenarios."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import Number, Result
from benchmarks.runs import Roster, output_of, peak_memory, roster_scenario, simulated
from fedmq.launch.estimates import TOLERANCE

#: Scenario files and their settings.
RUNS = (
    ("smoke.yaml", ()),
    ("rcsr_mr50.yaml", ("rounds=20",)),
    ("fedcafe/openmoji.yaml", ("rounds=5",)),
    ("feduch/openmoji.yaml", ("rounds=5",)),
)
#: Sizes at which `--check` measures only part of the items: in training and evaluation; ``smoke``: in evaluation.
_LARGE = Roster(silos=20, items=60_000, width=128, rounds=4, selected=5, test=4000)
_SMALL = Roster(silos=3, items=120, width=32, rounds=4, selected=3, test=2000)
_SCENARIOS = Path(__file__).parent.parent / "scenarios"


def run(*, smoke: bool = False) -> Result:
    """Estimate and execute each scenario; ``smoke``: only one on synthetic features, with few items."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        runs = [] if smoke else [(_SCENARIOS / file, settings) for file, settings in RUNS]
        runs.append((roster_scenario(folder, _SMALL if smoke else _LARGE), ()))
        return _result([_both(*each, folder / f"run-{place}") for place, each in enumerate(runs)])


def _both(file: Path, settings: tuple[str, ...], out: Path) -> tuple[str, dict[str, float], dict[str, float]]:
    """Name of a scenario, its estimates and measurements: ``seconds``, ``memory`` [MB], and ``traffic`` [MB]."""
    output_of("data", "features", str(file))  # an estimate needs them
    expected = output_of("scenario", str(file), "--check", "--quiet", settings=settings)
    name = f"{file.parent.name}/{file.stem}" if file.stem == "openmoji" else file.stem
    with peak_memory() as peak:
        summary = simulated(file, out, *settings)
    traffic = sum(sum(summary["bytes"][way].values()) for way in ("up", "down"))
    estimated = {
        "seconds": expected["startup"] + expected["rounds"],
        "memory": expected["memory"] / 2**20,
        "traffic": (expected["up"] + expected["down"]) / 1e6,
    }
    part = "" if expected["on_all_items"] else ", estimated from a part of its items"
    measured = {"seconds": summary["seconds"]["total"], "memory": peak[0], "traffic": traffic / 1e6}
    return name + part, estimated, measured


def _result(found: list[tuple[str, dict[str, float], dict[str, float]]]) -> Result:
    units, aims = {"seconds": "s", "memory": "MB", "traffic": "MB"}, {"seconds": 1.5, "memory": 1.3, "traffic": 1.05}
    numbers = []
    for name, estimated, measured in found:
        for what, unit in units.items():
            ratio = estimated[what] / measured[what]
            least, most = 1 / aims[what] if what == "seconds" else 2 - aims[what], aims[what]
            title = f"{name}: {what}, estimated {estimated[what]:.4g} {unit}, measured {measured[what]:.4g} {unit}"
            numbers.append(Number(title, ratio, "x", f"{least:.2f} to {most:.2f}"))
    return Result("estimates", tuple(numbers), (f"promised: {TOLERANCE}",))
