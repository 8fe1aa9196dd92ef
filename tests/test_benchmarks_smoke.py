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

import psutil
import pytest

from benchmarks import __main__ as command
from benchmarks import growth, line, runs
from benchmarks.growth import Limits, Point, Series, what_bends_first
from benchmarks.peers import comparison
from benchmarks.registry import BENCHMARKS, run_one
from fedmq.launch.forkserver import warm_up
from tests.command_line import completed
from tests.waiting import PATIENCE, wait_for

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


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "peers"])
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
    for row in (
        "relative difference",
        "a plain PyTorch loop",
        "rcsr_mr50_clip",
        "4 at a time to 1: time",
        "A rehearsal without a GPU",
    ):
        assert row in text, text


def test_a_step_of_the_gpu_benchmark_that_fails_is_named_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu  # OpenCLIP takes seconds to import

    assert code_of(monkeypatch, gpu, "--smoke", "--minutes", "0") == 1
    assert capsys.readouterr().out.count("Left out: ") == 5


def test_a_benchmark_that_exceeds_its_limit_is_ended_and_named_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, limits = tmp_path / "numbers.json", {"delta": 0.01, "hamming": PATIENCE}
    chosen = {name: replace(BENCHMARKS[name], limit_s=limit) for name, limit in limits.items()}
    monkeypatch.setattr(command, "BENCHMARKS", chosen)
    assert code_of(monkeypatch, command, "--only", "delta,hamming", "--smoke", "--json", str(file)) == 1
    late, next_one = json.loads(file.read_text())["benchmarks"]
    assert "delta: took longer than its limit of 0 s" in capsys.readouterr().out
    assert late["failed"] and not late["numbers"]
    assert next_one["numbers"] and not next_one["failed"]


def test_a_command_that_is_ended_ends_the_benchmark_that_runs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks", "--only", "soak", "--json", str(tmp_path / "numbers.json")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as started:
        command_itself = psutil.Process(started.pid)
        wait_for(lambda: len(command_itself.children()) == 2)  # the tracker of multiprocessing and the benchmark
        family = command_itself.children(recursive=True)
        started.terminate()
        assert started.wait(PATIENCE) == 143
    _, alive = psutil.wait_procs(family, PATIENCE)
    assert not alive


def test_results_are_kept_in_a_new_file_with_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of(monkeypatch, command, "--only", "soak", "--minutes", "0") == 1  # no time for all together
    (file,) = (tmp_path / "bench").iterdir()
    kept = json.loads(file.read_text())
    assert kept["machine"]["commit"] in file.name
    assert {"processor", "cores", "memory_gb", "load_average", "python", "torch", "numpy"} <= kept["machine"].keys()
    assert [(each["name"], each["failed"]) for each in kept["benchmarks"]] == [
        ("soak", "not started, as the limit of 0 minutes was reached")
    ]
    assert f"results: {file.relative_to(tmp_path)}" in capsys.readouterr().out


def test_growth_measures_its_smallest_sizes_and_draws_a_plot_per_axis(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warm_up("features")
    with runs_here():
        assert code_of(monkeypatch, growth, "--smoke", "--out", str(tmp_path)) == 0
    found = json.loads((tmp_path / "growth.json").read_text())
    page = (tmp_path / "growth.html").read_text()
    for name, series in found["axes"].items():
        points, missing = series["points"], series["missing"]
        assert not missing
        assert [point["size"] for point in points] == list(growth.AXES[name].sizes[:2])
        assert all(point["round_s"] > 0 and point["memory_mb"] > 0 and point["start_s"] > 0 for point in points)
        assert f"Cost over {growth.AXES[name].title}" in page
    for point in found["axes"]["model"]["points"]:
        assert point["sent_mb"] == pytest.approx(point["size"], rel=0.05)
    assert found["said"][0] in page
    # A second call has nothing left to measure: runs_here is over, and a run would fail.
    monkeypatch.setattr(growth, "measured", None)
    assert code_of(monkeypatch, growth, "--smoke", "--out", str(tmp_path)) == 0
    assert json.loads((tmp_path / "growth.json").read_text())["axes"] == found["axes"]


def test_what_bends_first_is_the_cost_per_unit_that_rises_at_the_smallest_multiple_of_its_axis() -> None:
    def points(*round_s: float) -> Series:
        return Series([Point(10.0**n, seconds, 10.0**n, 10.0**n, 1.0) for n, seconds in enumerate(round_s, 1)])

    # Per silo .5, .1, .1, .4 s: four times the least at 10,000. Per item 1, 1, 1.4, 1.4 s: at most 1.4 times.
    measured = {"silos": points(5, 10, 100, 4000), "items": points(10, 100, 1400, 14000)}
    assert what_bends_first(measured) == (
        "The time per round over the number of silos bends first: at 10,000 silos it is 0.4 s per unit, 4.0 times "
        "that at 100 (0.1 s)."
    )
    assert what_bends_first({"items": measured["items"]}).endswith(
        "The time per round over the number of items comes closest: at 1,000 items it is 1.4 s per unit, 1.4 times "
        "that at 10 (1 s)."
    )


def test_an_axis_ends_before_a_run_that_would_exceed_a_limit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_roster: object, size: float, _limit_s: float) -> Point:
        return Point(size, 1.0, 500 + 10 * size, 1.0, 1.0)

    monkeypatch.setattr(growth, "measured", measured)
    sizes, axis = (10, 30, 100, 300, 1000), Series()
    said = list(axis.go_on("silos", sizes, Limits(math.inf, 3000.0)))
    assert [line for line in said if line.endswith("...")] == [f"silos: {n} silos ..." for n in sizes[:3]]
    assert axis.missing == "silos: 300 silos not measured, as it could take 3,500 MB, and 3,000 MB are the limit"
    assert list(axis.go_on("silos", sizes, Limits(0.0, math.inf))) == []
    assert "s are left" in axis.missing
    list(axis.go_on("silos", sizes, Limits(math.inf, math.inf)))
    assert [point.size for point in axis.points] == list(sizes)
    assert not axis.missing


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
