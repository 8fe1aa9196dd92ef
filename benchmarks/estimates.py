"""Estimates of ``fedmq scenario --check`` compared with runs: time, memory and traffic of six scenarios."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import Number, Result
from benchmarks.runs import output_of, peak_memory, rcsr_scenario, simulated
from fedmq.launch.estimates import TOLERANCE

#: Scenario files and their settings.
RUNS = (
    ("smoke.yaml", ()),
    ("rcsr_mr50.yaml", ("rounds=20",)),
    ("fedcafe/openmoji.yaml", ("rounds=5",)),
    ("fedhap/openmoji.yaml", ("rounds=5",)),
    ("fedscmr/openmoji.yaml", ("rounds=5",)),
    ("feduch/openmoji.yaml", ("rounds=5",)),
)
_SCENARIOS = Path(__file__).parent.parent / "scenarios"


def run(*, smoke: bool = False) -> Result:
    """Estimate and execute each scenario; ``smoke``: one scenario of three silos on synthetic features, four rounds."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        if smoke:
            return _result([("made", *_both(rcsr_scenario(folder, smoke=True), ("rounds=4",), folder / "run"))])
        return _result(
            [
                (file, *_both(_SCENARIOS / file, settings, folder / str(place)))
                for place, (file, settings) in enumerate(RUNS)
            ]
        )


def _both(file: Path, settings: tuple[str, ...], out: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Estimates and measurements of a scenario: ``seconds``, ``memory`` [MB], and ``traffic`` [MB]."""
    expected = output_of("scenario", str(file), "--check", settings=settings)
    with peak_memory() as peak:
        summary = simulated(file, out, *settings)
    traffic = sum(sum(summary["bytes"][way].values()) for way in ("up", "down"))
    estimated = {
        "seconds": expected["startup"] + expected["rounds"],
        "memory": expected["memory"] / 2**20,
        "traffic": (expected["up"] + expected["down"]) / 1e6,
    }
    return estimated, {"seconds": summary["seconds"]["total"], "memory": peak[0], "traffic": traffic / 1e6}


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
