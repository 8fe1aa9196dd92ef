"""Shared fixtures: a cache for the session, and a tiny data set of aligned features."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.main
import typer.testing
import yaml
from hypothesis import HealthCheck, settings

from fedmq.launch.forkserver import CONTEXT
from tests import forked_programs, unsynced

torch.set_num_threads(1)
# How long an example takes depends on the machine: in a new clone, Hypothesis first computes tables of characters.
settings.register_profile("fedmq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedmq")
_ALL_SLOW = re.compile(r"^pytestmark = pytest\.mark\.slow$", re.MULTILINE)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker, to which xdist gives a part, begins with some of the longest tests and ends with quick files.

    So no long test is the last one, and the workers end together.
    """
    longest = [item for item in items if item.get_closest_marker("longest")]
    others = [item for item in items if not item.get_closest_marker("longest")]
    slow_files = {item.path for item in others if item.get_closest_marker("slow")}
    slow = [item for item in others if item.path in slow_files]
    quick = [item for item in others if item.path not in slow_files]
    count = getattr(config, "workerinput", {}).get("workercount", 1)
    part = len(items) // count
    items[:] = []
    for number in range(count):
        first = longest[number::count] + slow[len(slow) * number // count : len(slow) * (number + 1) // count]
        rest = len(quick) if number == count - 1 else max(0, part - len(first))
        items += [*first, *quick[:rest]]
        del quick[:rest]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m "not slow"``, leave out files with slow tests only: their imports take seconds in every worker."""
    if config.getoption("markexpr") != "not slow" or collection_path.suffix != ".py":
        return None
    return True if _ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


# Without compiled modules every process that a test starts compiles all of fedmq.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell that starts the tests in the background may ignore SIGINT; programs started by tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# A program builds its command line once, a test each time that it calls it.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for the session, so that the user's cache is untouched and features are computed once."""
    folder = tmp_path_factory.getbasetemp().parent / "fedmq-test-cache"
    patch = pytest.MonkeyPatch()
    patch.setenv("FEDMQ_CACHE", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _programs_are_forked() -> Iterator[None]:
    """From a forkserver, whose processes do not wait for the disk either."""
    preload = CONTEXT.set_forkserver_preload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CONTEXT, "set_forkserver_preload", lambda names: preload([unsynced.__name__, *names]))
        patch.setattr(subprocess, "Popen", forked_programs.Popen)
        yield


@pytest.fixture
def own_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts are not forked: each has an interpreter of its own."""
    monkeypatch.setattr(subprocess, "Popen", forked_programs.Popen.__base__)


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 items with two captions each, 24-d; matching images and texts are already close."""
    generator = np.random.default_rng(5)
    latent = generator.normal(size=(150, 24))
    image = latent + 0.7 * generator.normal(size=latent.shape)
    text = latent[:, None] + 0.7 * generator.normal(size=(150, 2, 24))
    path = tmp_path_factory.mktemp("features") / "tiny.npz"
    np.savez(
        path,
        image=(image / np.linalg.norm(image, axis=-1, keepdims=True)).astype(np.float32),
        text=(text / np.linalg.norm(text, axis=-1, keepdims=True)).astype(np.float32),
        labels=np.arange(150) % 5,
        split=np.array(["train"] * 100 + ["val"] * 20 + ["test"] * 30),
    )
    return path


@pytest.fixture(scope="session")
def tiny(features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario of four silos and four rounds on the tiny features; takes seconds with real processes."""
    path = tmp_path_factory.mktemp("scenario") / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "tiny",
                "rounds": 4,
                "participation": 0.75,
                "protocol": {"name": "rcsr", "warmup": 1},
                "data": {"name": "features", "path": str(features)},
                "backbone": {"name": "features", "bottleneck": 4},
                "silos": {"count": 4},
                "partition": {"kind": "dir_clusters", "alpha": 0.5, "clusters": 5, "sizes": "equal"},
                "missing_modality": {"silos": {"silo-02": "image", "silo-03": "text"}},
                "training": {"learning_rate": 0.003, "warmup_rounds": 1},
                "evaluation": {"every": 2},
            }
        )
    )
    return path


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny scenario with the signed logs of all processes; copy it to change it."""
    from tests import threaded_run

    folder, scenario = tmp_path_factory.mktemp("finished") / "tiny", threaded_run.resolved(tiny)
    folder.mkdir()
    (folder / "scenario.yaml").write_text(scenario.dump())
    assert threaded_run.run(scenario, folder).summary is not None
    return folder
