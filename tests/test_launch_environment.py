"""Odd machines: any number of silos and open files, any folder for temporary files, any mode of key files."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.program import OTHER_DESCRIPTORS
from fedmq.cli.run import scenario_command
from fedmq.config import resolve as scenarios
from fedmq.config.resolve import Source
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation import preflight
from fedmq.launch import forkserver
from fedmq.launch.forkserver import FORKSERVER, private_folder
from fedmq.launch.processes import Limits, plan_hosting
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.transports.registry import check_uri
from fedmq.wire.transports.shared_connections import MAX_BRANCHES
from tests.waiting import PATIENCE

#: Open files of a host per silo: its message log, and its log for operators.
PER_SILO = 2


@pytest.fixture(scope="module")
def scenario(tiny: Path) -> Scenario:
    return scenarios.load(tiny, ("missing_modality.silos={}",))


def of_size(scenario: Scenario, count: int, hosts: int | None, slots: int) -> Scenario:
    silos = scenario.silos.model_copy(update={"count": count, "hosts": hosts, "slots": slots})
    return scenario.model_copy(update={"silos": silos})


@given(
    count=st.one_of(st.integers(1, 90), st.integers(1, 3000)),
    descriptors=st.one_of(st.integers(1, 300), st.integers(1, 5000)),
    memory=st.one_of(st.just(1 << 50), st.integers(0, 8 << 30)),
    hosts=st.one_of(st.none(), st.integers(1, 40)),
    slots=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_fits_the_open_files_for_any_number_of_silos_or_one_line_says_what_to_raise(
    scenario: Scenario, count: int, descriptors: int, memory: int, hosts: int | None, slots: int
) -> None:
    chosen = of_size(scenario, count, hosts, slots)
    try:
        plan = plan_hosting(chosen, Limits(memory, descriptors))
    except InputError as error:
        assert descriptors < OTHER_DESCRIPTORS + PER_SILO
        assert "\n" not in str(error) and "ulimit -n" in str(error) and str(descriptors) in str(error)
        return
    names = [name for host in plan.hosts for name in host]
    if not plan.hosts:  # each silo is a separate process, of which the command keeps two files open
        assert hosts is None and PER_SILO * count + OTHER_DESCRIPTORS <= descriptors
        return
    assert sorted(names) == sorted(chosen.silo_names)
    for host in plan.hosts:
        assert 1 <= len(host) <= MAX_BRANCHES
        assert PER_SILO * len(host) + OTHER_DESCRIPTORS <= descriptors
    assert "\n" not in plan.reason and bool(plan.reason) == (hosts is None)


def folder_of(parent: Path, length: int) -> Path:
    """A new folder whose path has this number of bytes, if the parent's is shorter."""
    path = os.fsencode(parent)
    while len(path) + 1 < length:
        path += b"/" + b"d" * min(100, length - len(path) - 1)
    Path(os.fsdecode(path)).mkdir(parents=True, exist_ok=True)
    return Path(os.fsdecode(path))


def assert_binds(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)


@given(length=st.integers(1, 300), runtime=st.one_of(st.none(), st.integers(1, 150)))
@settings(max_examples=60, deadline=None)
def test_sockets_fit_whatever_the_length_of_the_folder_for_temporary_files(length: int, runtime: int | None) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder_of(Path(base), length)))
        if runtime is None:
            patch.delenv("XDG_RUNTIME_DIR", raising=False)
        else:
            patch.setenv("XDG_RUNTIME_DIR", str(folder_of(Path(base) / "r", runtime)))
        with private_folder() as private:
            assert stat.S_IMODE(private.stat().st_mode) == 0o700
            check_uri(f"ipc://{private}/wire", "uri", listening=True)
            assert_binds(f"{private}/wire")
        with private_folder(FORKSERVER) as forks:  # the forkserver's socket, as multiprocessing makes it in there
            own = tempfile.mkdtemp(prefix="pymp-", dir=forks)
            assert_binds(tempfile.mktemp(prefix="listener-", dir=own))
        assert not private.exists()


def test_a_forked_child_that_drops_the_folder_does_not_remove_it() -> None:
    held = [contextlib.ExitStack()]
    folder = held[0].enter_context(private_folder(FORKSERVER))
    child = multiprocessing.get_context("fork").Process(target=held.clear)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert folder.is_dir()
    held[0].close()
    assert not folder.exists()


@given(mode=st.integers(0, 0o777), which=st.sampled_from(["private key", "accepted key", "accepted"]))
@settings(max_examples=60, deadline=None)
def test_keys_that_others_could_read_or_replace_are_refused_in_one_line(mode: int, which: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        init_keys(folder, ["coordinator", "silo-00"])
        path = {
            "private key": folder / "silo-00.key",
            "accepted key": folder / "accepted" / "silo-00.pub",
            "accepted": folder / "accepted",
        }[which]
        path.chmod(mode | (0o700 if which == "accepted" else 0o400))
        wrong = mode & (0o077 if which == "private key" else 0o022)
        try:
            load_identity(folder, "silo-00")
            load_accepted(folder)
        except InputError as error:
            assert wrong
            assert str(path) in str(error) and "chmod" in str(error) and "\n" not in str(error)
        else:
            assert not wrong


@pytest.mark.slow
def test_a_comparison_runs_with_a_long_folder_for_temporary_files(tiny: Path, tmp_path: Path) -> None:
    words = ["--vary", "training.learning_rate=0.001", "--seeds", "0", "--set", "rounds=1"]
    places = ["--out", str(tmp_path / "table"), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-m", "fedmq", "compare", str(tiny), *words, *places, "--quiet"],
        env={**os.environ, "TMPDIR": str(folder_of(tmp_path, 120 + len(str(tmp_path))))},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "learning_rate=0.001" in done.stdout


# ----------------------------------------------------------------------------------------------------- the forkserver
_PROGRAM = """
import gc, json, pathlib, sys
import fedmq.launch.preload
import torch
status = pathlib.Path("/proc/self/status").read_text()
threads = next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:"))
print(json.dumps({
    "threads": int(threads),
    "cuda": torch.cuda.is_initialized(),
    "collecting": gc.isenabled(),
    "frozen": gc.get_freeze_count(),
    "modules": sorted(sys.modules),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_forkserver_has_one_thread_no_cuda_and_every_module_that_a_silo_needs() -> None:
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env={**os.environ, **one}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["threads"] == 1
    assert not found["cuda"]
    # Frozen objects are not collected, so that no child writes to shared pages; its own garbage is.
    assert found["frozen"] > 100_000
    assert found["collecting"]
    needed = {"numpy.random", "numpy.ma", "protocols.rcsr", "protocols.objectives.info_nce", "silos.host", "zmq"}
    needed |= {"encodings.cp437", "fedmq.launch.processes"}
    assert needed <= set(found["modules"])
    assert not {"pandas", "plotly", "scipy.linalg", "sklearn", "torchvision"} & set(found["modules"])


def test_the_forkserver_starts_before_a_scenarios_names_are_looked_up_unless_nothing_is_forked(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    stopped: list[bool] = []

    def refused(source: Source) -> None:
        raise InputError("the scenario", source.scenario.name, "another one")

    monkeypatch.setattr(forkserver, "warm_up", done.append)
    monkeypatch.setattr(forkserver, "stop", lambda: stopped.append(True))
    monkeypatch.setattr(preflight, "refuse_scenario", refused)
    for launcher, backbones in (("local", ["features"]), ("inline", [])):
        done.clear()
        with pytest.raises(InputError, match="another one"):
            scenario_command(tiny, settings=[f"launcher={launcher}"])
        assert done == backbones
        assert len(stopped) == (launcher == "inline")  # the one that was started with the command
    with pytest.raises(InputError, match="another one"):
        scenario_command(tiny, check=True)
    assert not done


_COMMAND = """
import sys
from fedmq.__main__ import main
from fedmq.launch import forkserver
forkserver.warm_up = lambda backbone: print(backbone, sorted({"torch", "pydantic", "fedmq.cli"} & {*sys.modules}))
main()
"""


def test_the_forkserver_starts_before_the_imports_of_a_command_that_forks(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    for words, printed in (
        (("scenario", missing), "features []\n"),
        (("scenario", missing, "--check"), ""),
        (("data", missing), ""),
    ):
        words_of = [sys.executable, "-c", _COMMAND, *words]
        done = subprocess.run(words_of, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert (done.returncode, done.stdout) == (2, printed)


_INTERRUPTED = """
import os, signal
from fedmq.__main__ import main
from fedmq.launch import forkserver
forkserver.warm_up = lambda _: os.kill(os.getpid(), signal.SIGINT)
main()
"""


def test_ctrl_c_while_the_forkserver_starts_is_answered_in_one_line() -> None:
    words = [sys.executable, "-c", _INTERRUPTED, "scenario", "smoke"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (1, "fedmq: interrupted\n")


_QUICK_IMPORTS = """
import gc
from fedmq.cli.scenarios import quick_imports
with quick_imports():
    import wsgiref.simple_server
frozen = gc.get_freeze_count()
assert gc.isenabled() and frozen
with quick_imports():  # what a command has made in the meantime is collected
    import wsgiref.simple_server
assert gc.get_freeze_count() == frozen
"""


def test_a_command_collects_no_garbage_of_its_imports() -> None:
    subprocess.run([sys.executable, "-c", _QUICK_IMPORTS], timeout=PATIENCE, check=True)


def test_a_stopped_forkserver_has_ended_and_is_started_again() -> None:
    program = (
        "from multiprocessing.forkserver import _forkserver as server; from fedmq.launch import forkserver;"
        "forkserver.warm_up('features'); first = server._forkserver_pid; forkserver.stop();"
        "assert server._forkserver_pid is None; forkserver.warm_up('features'); assert server._forkserver_pid != first"
    )
    # Returns only once nobody holds the pipe: the second forkserver ends with the program, too, although it imports.
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE, check=True)
