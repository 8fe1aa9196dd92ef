"""``fedmq.run`` and ``fedmq.compare``: scenarios from scripts and notebooks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedmq
from fedmq.api.launch import settings_of
from fedmq.errors import InputError, RunError
from fedmq.runs.run_records import MergeLine
from tests import data_set_folders, in_process_run
from tests.forked_programs import JOBS_HERE
from tests.threaded_run import resolved
from tests.waiting import PATIENCE

#: Each run starts a program, which takes seconds.
pytestmark = pytest.mark.slow
INLINE = {"launcher": "inline", "progress": False}
METHOD = '''"""A method from the user's own file."""

from protocols.fedavg import AnchoredFedAvg


class Mine(AnchoredFedAvg):
    """FedAvg under a name of its own."""


PROTOCOL = Mine
'''


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[fedmq.Run, list[MergeLine]]:
    """A finished run, and the merges that its callback received."""
    merges: list[MergeLine] = []
    out = tmp_path_factory.mktemp("runs") / "a"
    return fedmq.run(tiny, out=out, on_merge=merges.append, **INLINE), merges


def test_callbacks_receive_every_merge_and_the_run_its_results(finished: tuple[fedmq.Run, list[MergeLine]]) -> None:
    run, merges = finished
    assert [merge.version for merge in merges] == [1, 2, 3, 4]
    assert list(run.merges.index) == [1, 2, 3, 4]
    assert list(run.metrics.index) == [0, 2, 4]
    assert run.metrics.loc[4, "mean_r1"] == run.summary.metrics["mean_r1"]
    assert list(run.per_silo["modalities"]) == ["image+text", "image+text", "image", "text"]
    assert run.per_silo["samples"].sum() == 100
    assert set(run.messages["process"]) == {"coordinator"}
    assert run.report().stat().st_size > 10_000
    assert repr(run).startswith(f"<fedmq run {run.folder}: rcsr, 4 rounds, mean_r1 ")
    assert "recall@1, mean" in run._repr_html_()
    lines = str(run.summary).splitlines()  # one screen, though the file has a paragraph for each silo
    assert len(lines) < 30 and max(map(len, lines)) <= 100 and "seed: 0" in lines
    with pytest.raises(InputError, match="precomputed features"):
        run.model().embed_texts(["a text"])


def test_a_scenario_may_be_a_mapping_and_keywords_are_its_keys(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mapping = yaml.safe_load(tiny.read_text())
    run = fedmq.run(mapping, rounds=1, protocol="fedavg", partition={"alpha": 2}, **INLINE)
    assert run.folder.parent == Path("runs")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    scenario = yaml.safe_load((run.folder / "scenario.yaml").read_text())
    assert (run.summary.protocol, run.summary.versions) == ("fedavg", 1)
    assert scenario["partition"]["alpha"] == 2
    assert scenario["partition"]["clusters"] == 5


def test_keywords_become_settings() -> None:
    keys: tuple[tuple[Mapping[str, Any], list[str]], ...] = (
        ({"rounds": 3, "seed": 1}, ["rounds=3", "seed=1"]),
        ({"protocol": {"name": "rcsr", "tau": 0.1}}, ['protocol={"name": "rcsr", "tau": 0.1}']),
        ({"protocol.tau": 0.1}, ["protocol.tau=0.1"]),
        ({"data": "openmoji"}, ['data.name="openmoji"']),
        ({"data": {"path": Path("a b.npz")}}, ['data.path="a b.npz"']),
        ({"silos": {"count": 3}, "launcher": None}, ["silos.count=3", "launcher=null"]),
        ({"faults": ({"kind": "drop"},)}, ['faults=[{"kind": "drop"}]']),
    )
    for given, settings in keys:
        assert settings_of(given) == settings


def test_a_class_of_a_notebook_cell_is_refused_with_what_to_do() -> None:
    kind = type("Mine", (), {"__module__": "__main__"})
    with pytest.raises(InputError, match=r"%%writefile mine\.py"):
        settings_of({"protocol": kind})


def test_bad_input_is_refused_before_anything_is_written(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tiny\.yaml: rounds: found 0"):
        fedmq.run(tiny, tmp_path / "run", rounds=0, **INLINE)
    with pytest.raises(InputError, match="on_merg: found 'a function', allowed: on_merge"):
        fedmq.run(tiny, tmp_path / "run", on_merg=print, **INLINE)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match=r"fedmq\.resume"):
        fedmq.run(tiny, tmp_path / "full", **INLINE)


def test_an_error_of_the_program_is_raised_with_its_words(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"data\.path.*an existing file"):
        fedmq.run(tiny, tmp_path / "run", data={"path": str(tmp_path / "nowhere.npz")}, **INLINE)


def test_a_callback_stops_a_run_that_resume_finishes_with_the_same_model(
    tiny: Path, tmp_path: Path, finished: tuple[fedmq.Run, list[MergeLine]]
) -> None:
    def stop(_: MergeLine) -> None:
        raise fedmq.StopRun

    stopped = fedmq.run(tiny, tmp_path / "run", rounds=30, on_merge=stop, **INLINE)
    assert not stopped.finished
    with pytest.raises(InputError, match="unfinished"):
        stopped.model()
    assert "not finished" in repr(stopped)
    resumed = fedmq.resume(stopped.folder, progress=False)
    whole = in_process_run.run(resolved(tiny, "rounds=30"), tmp_path / "whole")
    assert resumed.summary.model_digest == whole.summary.model_digest
    with pytest.raises(InputError, match="finished run"):
        fedmq.resume(finished[0].folder)


def test_an_error_of_a_callback_stops_the_run_and_is_raised(tiny: Path, tmp_path: Path) -> None:
    def fail(_: MergeLine) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        fedmq.run(tiny, tmp_path / "run", rounds=60, on_merge=fail, **INLINE)
    assert raised.value.__notes__ == [
        f"fedmq: the run was stopped; fedmq.resume({str(tmp_path / 'run')!r}) continues it"
    ]
    assert not fedmq.open_run(tmp_path / "run").finished


def test_an_interrupt_stops_real_processes_cleanly(tiny: Path, tmp_path: Path) -> None:
    def interrupt(_: MergeLine) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        fedmq.run(tiny, tmp_path / "run", rounds=400, on_merge=interrupt, progress=False)
    stopped = fedmq.open_run(tmp_path / "run")
    assert not stopped.finished
    assert "coordinator" in set(stopped.messages["process"])


def test_a_plain_script_needs_no_main_guard_and_runs_a_method_defined_in_its_own_file(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(METHOD)
    script = tmp_path / "script.py"
    script.write_text(
        "import fedmq\n"
        "from mine import PROTOCOL\n"
        f"run = fedmq.run({str(tiny)!r}, 'run', rounds=1, protocol=PROTOCOL, launcher='inline')\n"
        "print('once', run.summary.versions)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.stdout.count("once 1") == 1, done.stderr


@pytest.mark.longest
def test_the_page_on_python_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs" / "howto" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    rows = []
    for number in range(60):
        data_set_folders.photo(tmp_path / f"{number}.png", number)
        rows.append(f"{number}.png,a wall number {number},label-{number % 3}")
    data_set_folders.write(tmp_path / "list.csv", "\n".join(["image,captions,labels", *rows]))
    smoke = yaml.safe_load((root / "scenarios" / "smoke.yaml").read_text(encoding="utf-8"))
    smoke |= {"partition": {"kind": "iid"}, "launcher": "inline"}
    smoke |= {"data": {"name": "manifest", "path": str(tmp_path / "list.csv"), "queries": 20}}
    data_set_folders.write(tmp_path / "scenarios" / "smoke.yaml", yaml.safe_dump(smoke))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(JOBS_HERE, "1")
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "python.md", "exec"), names)
    assert names["finished"].summary.versions == 3
    assert names["texts"].shape == (2, 512)
    compared = names["compared"]
    assert (len(compared.table), len(compared.runs)) == (2, 4)
    assert compared.plots.is_file()
    heads = re.findall("<th>([^<]+)</th>", compared._repr_html_())
    assert heads == ["name", "mean_r1", "mean_r1: difference", "mean_r10", "mean_r10: difference"]


def test_a_refused_comparison_says_why_in_its_error(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="allowed: one of"):
        fedmq.compare(tiny, seeds=[0], protocol="nothing", out=tmp_path / "other", progress=False)
    with pytest.raises(RunError, match=r"^fedmq: .*roundz.*did you mean rounds\?$"):
        fedmq.compare(tiny, seeds=[0], roundz=1, out=tmp_path / "compared")
