"""Every benchmark runs at its smallest size and reports finite numbers; how fast fedmq is, is not tested."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks import __main__ as command
from benchmarks import line, runs
from benchmarks.peers import comparison
from benchmarks.registry import BENCHMARKS, run_one
from fedmq.launch.forkserver import warm_up
from tests.command_line import completed
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
#: The steps of the benchmark of a GPU in a process whose runs share its imports, and its forkserver those of OpenCLIP.
REHEARSAL = (
    "from tests.test_benchmarks_smoke import runs_here; from benchmarks import gpu\nwith runs_here(): gpu.main()"
)


def run_here(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """In place of ``subprocess.run``: a command of fedmq in this process, which saves its imports."""
    assert words[:3] == [sys.executable, "-m", "fedmq"]
    done = completed(*words[3:])
    done.check_returncode()
    return done


def runs_here() -> mock._patch[SimpleNamespace]:
    """The runs of the benchmarks are commands in this process."""
    return mock.patch.object(runs, "subprocess", SimpleNamespace(run=run_here, PIPE=subprocess.PIPE))


def code_of(monkeypatch: pytest.MonkeyPatch, module: object, *words: str) -> int:
    """The exit code of a command of the benchmarks in this process."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    try:
        module.main()  # type: ignore[attr-defined]
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("name", [name for name, benchmark in BENCHMARKS.items() if benchmark.by_default])
def test_each_benchmark_runs_at_its_smallest_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "numbers.json"
    warm_up("features")
    monkeypatch.setattr(line, "keep_buffers", lambda: None)  # not undone, and this process goes on to other tests
    with runs_here():
        run_one(name, True, file)
    result = json.loads(file.read_text())
    assert result["numbers"]
    assert all(math.isfinite(number["value"]) for number in result["numbers"])
    assert "different" not in " ".join(result["notes"])


@pytest.mark.longest
def test_the_gpu_benchmark_rehearses_every_step_on_the_cpu(tmp_path: Path) -> None:
    table = tmp_path / "gpu.md"
    words = [sys.executable, "-c", REHEARSAL, "--smoke", "--out", str(table)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    text = table.read_text()
    assert "Left out" not in text
    for row in ("relative difference", "a plain PyTorch loop", "rcsr_mr50_clip", "four silos on one GPU, 4 at a time"):
        assert row in text, text


def test_a_step_of_the_gpu_benchmark_that_fails_is_named_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu  # OpenCLIP takes seconds to import

    assert code_of(monkeypatch, gpu, "--smoke", "--minutes", "0") == 1
    assert capsys.readouterr().out.count("Left out: ") == 4


def test_a_benchmark_that_exceeds_its_limit_is_ended_and_named_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, limits = tmp_path / "numbers.json", {"delta": 0.0, "hamming": PATIENCE}
    chosen = {name: replace(BENCHMARKS[name], limit_s=limit) for name, limit in limits.items()}
    monkeypatch.setattr(command, "BENCHMARKS", chosen)
    assert code_of(monkeypatch, command, "--only", "delta,hamming", "--smoke", "--json", str(file)) == 1
    late, next_one = json.loads(file.read_text())["benchmarks"]
    assert "delta: took longer than its limit of 0 s" in capsys.readouterr().out
    assert late["failed"] and not late["numbers"]
    assert next_one["numbers"] and not next_one["failed"]


def test_without_flower_the_comparison_with_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(comparison, "PYTHON", tmp_path / "python")
    with pytest.raises(FileNotFoundError, match="Flower is not installed; make peers"):
        run_one("peers", True, tmp_path / "numbers.json")


def test_an_unknown_benchmark_is_refused_with_the_names_that_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(monkeypatch, command, "--only", "speed") == 2
    assert f"found speed, allowed: {', '.join(BENCHMARKS)}" in capsys.readouterr().err
