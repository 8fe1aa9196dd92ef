"""Every method and base on a real GPU; skipped without one. :mod:`tests.test_encoders_gpu` simulates one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils import deterministic

import protocols
from fedmq.config.scenario import Objective, Scenario
from fedmq.models.hash_networks import plans_of
from fedmq.retrieval.gallery import export
from fedmq.retrieval.released_model import open_release
from tests import in_process_run
from tests.test_encoders_gpu import fitting
from tests.threaded_run import resolved

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
#: Largest relative difference of a model between a GPU and the CPU that counts as equal: at most 2.2e-4 on an H100.
CLOSE = 1e-3


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """Restore the torch flags that a run on a GPU sets."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, deterministic.fill_uninitialized_memory
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def file(tiny: Path, features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scenario with ten public items."""
    folder = tmp_path_factory.mktemp("public")
    arrays = dict(np.load(features))
    arrays["split"] = np.array(["public"] * 10 + list(arrays["split"][10:]))
    np.savez(folder / "public.npz", **arrays)
    (folder / "public.yaml").write_text(tiny.read_text().replace(str(features), str(folder / "public.npz")))
    return folder / "public.yaml"


def weights(run: Path) -> np.ndarray:
    arrays = load_file(run / "model" / "model.safetensors")
    return np.concatenate([arrays[name].ravel().astype(np.float64) for name in sorted(arrays)])


def check(scenario: Scenario, out: Path) -> None:
    """Run twice on the GPU and once on the CPU; compare the models."""
    on_gpu = scenario.model_copy(update={"device": "cuda:0"})
    once, again = (in_process_run.run(on_gpu, out / name).summary.plain() for name in ("once", "again"))
    assert once["model_digest"] == again["model_digest"]
    assert once["tasks"]["failed"] == 0 < once["tasks"]["merged"]
    assert once["versions_of"]["gpu"] == torch.cuda.get_device_name(0)
    in_process_run.run(scenario, out / "cpu")
    here, there = weights(out / "cpu"), weights(out / "once")
    difference = float(np.linalg.norm(there - here) / np.linalg.norm(here))
    print(f"relative difference from the CPU's model: {difference:.2g}")
    assert difference < CLOSE


@pytest.mark.parametrize("name", protocols.names())
def test_every_method_gives_the_same_model_twice_on_a_gpu_and_nearly_the_cpus(
    name: str, file: Path, tmp_path: Path
) -> None:
    check(resolved(file, "rounds=3", f"protocol={name}", *fitting(name)), tmp_path)


@pytest.mark.parametrize("base", [base for base in protocols.losses() if plans_of(Objective(base=base))])
def test_every_base_gives_the_same_model_twice_on_a_gpu_and_nearly_the_cpus(
    base: str, file: Path, tmp_path: Path
) -> None:
    settings = ["rounds=2", "protocol=moon", f"objective={{base: {base}, bits: 8, hidden: 16}}"]
    check(resolved(file, *settings, "evaluation.gallery=database"), tmp_path)


def test_a_released_model_embeds_nearly_as_on_the_cpu(file: Path, tmp_path: Path) -> None:
    in_process_run.run(resolved(file, "rounds=1"), tmp_path)
    here = export(open_release(tmp_path, "cpu")).array("image").copy()
    there = export(open_release(tmp_path, "cuda:0")).array("image")
    np.testing.assert_allclose(there, here, atol=1e-5)
