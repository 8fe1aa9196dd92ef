"""Estimates of ``fedmq scenario --check`` compared with runs: time, memory and traffic of six scenarios."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import Number, Result
from benchmarks.runs import rcsr_scenario
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
#: Time between two measurements of memory [s].
_EVERY_S = 0.25


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


def _both(file: Path, settings: tuple[str, ...], out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Estimates and measurements of a scenario: ``seconds``, ``memory`` [MB], and ``traffic`` [MB]."""
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "fedmq", "scenario", str(file), *options, "--json", "--quiet"]
    checked = subprocess.run([*command, "--check"], stdout=subprocess.PIPE, check=True, timeout=300.0)
    expected = json.loads(checked.stdout)
    with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE) as started:
        memory = [0.0]
        watcher = threading.Thread(target=_watch, args=(started, memory), daemon=True)
        watcher.start()
        text, _ = started.communicate(timeout=600.0)
        watcher.join()
    summary = json.loads(text)
    traffic = sum(sum(summary["bytes"][way].values()) for way in ("up", "down"))
    estimated = {
        "seconds": expected["startup"] + expected["rounds"],
        "memory": expected["memory"] / 2**20,
        "traffic": (expected["up"] + expected["down"]) / 1e6,
    }
    return estimated, {"seconds": summary["seconds"]["total"], "memory": memory[0] / 2**20, "traffic": traffic / 1e6}


def _watch(started: subprocess.Popen[bytes], peak: list[float]) -> None:
    """Keep the largest sum of the proportional set sizes of a process and all its descendants [bytes]."""
    command = psutil.Process(started.pid)
    while started.poll() is None:
        total = 0
        try:
            for each in (command, *command.children(recursive=True)):
                total += each.memory_full_info().pss
        except (psutil.Error, OSError):
            continue  # a process has just ended
        peak[0] = max(peak[0], float(total))
        time.sleep(_EVERY_S)


def _result(found: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> Result:
    units, aims = {"seconds": "s", "memory": "MB", "traffic": "MB"}, {"seconds": 1.5, "memory": 1.3, "traffic": 1.05}
    numbers = []
    for name, estimated, measured in found:
        for what, unit in units.items():
            ratio = estimated[what] / measured[what]
            least, most = 1 / aims[what] if what == "seconds" else 2 - aims[what], aims[what]
            title = f"{name}: {what}, estimated {estimated[what]:.4g} {unit}, measured {measured[what]:.4g} {unit}"
            numbers.append(Number(title, ratio, "x", f"{least:.2f} to {most:.2f}"))
    return Result("estimates", tuple(numbers), (f"promised: {TOLERANCE}",))
