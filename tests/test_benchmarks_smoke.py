"""Every benchmark runs at its smallest size and reports finite numbers; how fast fedmq is, is not tested."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_runs_at_its_smallest_size(name: str, tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    done = ran("benchmarks", "--only", name, "--smoke", "--json", str(file))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["benchmarks"]
    assert result["numbers"]
    assert all(math.isfinite(number["value"]) for number in result["numbers"])
    assert "bitwise different" not in " ".join(result["notes"])


def test_the_gpu_benchmark_rehearses_every_step_on_the_cpu(tmp_path: Path) -> None:
    table = tmp_path / "gpu.md"
    done = ran("benchmarks.gpu", "--smoke", "--out", str(table))
    assert done.returncode == 0, done.stderr
    text = table.read_text()
    assert "Left out" not in text
    for row in ("relative difference", "a plain PyTorch loop", "rcsr_mr50_clip", "four silos on one GPU, 4 at a time"):
        assert row in text, text


def test_a_step_of_the_gpu_benchmark_that_fails_is_named_and_fails_the_command(tmp_path: Path) -> None:
    done = ran("benchmarks.gpu", "--smoke", "--minutes", "0")
    assert done.returncode == 1
    assert done.stdout.count("Left out: ") == 4


def test_an_unknown_benchmark_is_refused_with_the_names_that_exist() -> None:
    done = ran("benchmarks", "--only", "speed")
    assert done.returncode == 2
    assert f"found speed, allowed: {', '.join(BENCHMARKS)}" in done.stderr
