"""Every method, base and frozen encoder on a simulated GPU: no tensor is left on the CPU; and on a real one, if any."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils import deterministic

import protocols
from fedmq.config.scenario import Objective, Scenario
from fedmq.errors import FedmqError
from fedmq.models.hash_networks import plans_of
from fedmq.retrieval.gallery import export
from fedmq.retrieval.released_model import open_release
from tests import data_set_folders, in_process_run
from tests.pretend_gpu import Far, pretended
from tests.small_federation import ADAPTERS, OBJECTIVES
from tests.test_encoders_clip import TINY
from tests.threaded_run import resolved

pytestmark = pytest.mark.slow
real = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: Largest relative difference of a model between a GPU and the CPU that counts as equal: at most 2.2e-4 on an H100.
CLOSE = 1e-3


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """Restore the torch flags that a run on a GPU sets."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, deterministic.fill_uninitialized_memory
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, deterministic.fill_uninitialized_memory = before
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
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


def figures(summary: Any) -> Any:
    return {key: summary[key] for key in ("model_digest", "metrics", "fairness", "per_silo_mean")}


def both(scenario: Scenario, out: Path, patch: pytest.MonkeyPatch) -> None:
    """Run on the GPU and on the CPU and compare models and metrics."""
    here = in_process_run.run(scenario, out / "cpu").summary.plain()
    with pretended(patch):
        there = in_process_run.run(scenario.model_copy(update={"device": "cuda:0"}), out / "gpu").summary.plain()
    assert figures(there) == figures(here)
    assert there["tasks"]["failed"] == 0 < there["tasks"]["merged"]


def fitting(name: str) -> list[str]:
    """Objective and backbone settings that a method requires."""
    base = OBJECTIVES.get(name)
    settings = [f"objective={json.dumps(base.model_dump(mode='json', exclude_unset=True))}"] if base else []
    return settings + ([f"backbone.adapter={ADAPTERS[name]}"] if name in ADAPTERS else [])


@pytest.mark.parametrize("name", protocols.names())
def test_every_method_computes_the_same_on_a_gpu_as_on_the_cpu(
    name: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(resolved(file, "rounds=2", f"protocol={name}", *fitting(name)), tmp_path, monkeypatch)


BASES = [base for base in protocols.losses() if plans_of(Objective(base=base))]


@pytest.mark.parametrize("first", range(0, len(BASES), 4))
def test_every_base_computes_the_same_on_a_gpu_as_on_the_cpu(
    first: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for base in BASES[first : first + 4]:
        settings = ["rounds=1", "protocol=moon", f"objective={{base: {base}, bits: 8, hidden: 16}}"]
        both(resolved(file, *settings, "evaluation.gallery=database"), tmp_path / base, monkeypatch)


@pytest.mark.parametrize(
    "method",
    [
        "{name: rcsr, warmup: 0, personal: router, personal_onset: 1, anchor: multi, filler: learned}",
        "{name: fedbridge, warmup: 0, personal: true, personal_onset: 1, bank: all}",
        "{name: fedavg, single_modality: idle}",
        "{name: moon, personal: true, buffer: 2}",
    ],
)
def test_personal_state_is_the_same_on_a_gpu_as_on_the_cpu(
    method: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = "privacy={clip_norm: 1.0, noise_multiplier: 0.1}"
    both(resolved(file, "rounds=3", f"protocol={method}", noise, "participation=1"), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "more",
    [
        {"adapter_site": "blocks"},
        {"adapter_site": "feature"},
        {"adapter_site": "blocks", "adapter": "mma"},
        {"adapter_site": "blocks", "adapter": "lora"},
    ],
)
def test_an_open_clip_model_computes_the_same_on_a_gpu_as_on_the_cpu(
    more: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    data = {"name": "flickr8k", "path": str(data_set_folders.flickr(tmp_path / "set"))}
    backbone = {"name": str(tmp_path / "tiny.json"), "head": "mlp", "bottleneck": 8, **more}
    (tmp_path / "clip.yaml").write_text(
        json.dumps(
            {
                "name": "clip",
                "rounds": 1,
                "data": data,
                "backbone": backbone,
                "silos": {"count": 1},
                "partition": {"kind": "iid"},
                "protocol": {"mma": "pfedmma", "lora": "ffalora"}.get(more.get("adapter", ""), "rcsr"),
            }
        )
    )
    scenario = resolved(tmp_path / "clip.yaml")
    # The GPU run comes first: it makes the CPU use the same attention kernel. Each run extracts its own features.
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "there"))
    with pretended(monkeypatch):
        there = in_process_run.run(scenario.model_copy(update={"device": "cuda:0"}), tmp_path / "gpu").summary.plain()
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "here"))
    here = in_process_run.run(scenario, tmp_path / "cpu").summary.plain()
    assert figures(there) == figures(here)


def test_a_released_model_computes_the_same_on_a_gpu_as_on_the_cpu(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    in_process_run.run(resolved(file, "rounds=1"), run)
    here = export(open_release(run, "cpu"))
    kept = here.array("image").copy()
    with pretended(monkeypatch):
        there = export(open_release(run, "cuda:0"))
        np.testing.assert_array_equal(there.array("image"), kept)


def test_a_process_on_a_gpu_computes_deterministically(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    here = in_process_run.run(resolved(file, "rounds=1"), tmp_path / "cpu").summary.plain()
    assert "gpu" not in here["versions_of"]
    assert not torch.are_deterministic_algorithms_enabled()
    with pretended(monkeypatch):
        there = in_process_run.run(resolved(file, "rounds=1", "device=cuda:0"), tmp_path / "gpu").summary.plain()
    assert there["versions_of"]["gpu"] == "pretended"
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.allow_tf32
    cuda = torch.backends.cuda
    assert not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())


def test_the_simulated_gpu_refuses_what_a_real_gpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    near = torch.ones(3, 4)
    with pretended(monkeypatch):
        far = near.to("cuda:0")
        assert isinstance(far, Far) and far.device == torch.device("cuda:0")
        assert isinstance(torch.zeros(2, device="cuda:0"), Far)
        weight = torch.zeros(4, 2, device="cuda:0").requires_grad_()
        (far @ weight).sum().backward()
        assert isinstance(weight.grad, Far) and weight.grad.cpu().numpy().sum() == 24
        with pytest.raises(RuntimeError, match="same device"):
            far + near
        with pytest.raises(RuntimeError, match="indices"):
            near[far.long()[:, 0]]
        with pytest.raises(TypeError, match="numpy"):
            far.numpy()
        with pytest.raises(RuntimeError, match="draw"):
            torch.randn(3, device="cuda:0")


def test_a_method_that_leaves_a_tensor_on_the_cpu_fails_on_the_simulated_gpu(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocols.parts.training.labels_of", lambda local, rows: torch.zeros(len(rows), 5))
    scenario = resolved(
        file, "rounds=1", "objective={base: dpsh, bits: 8, hidden: 16}", "device=cuda:0", "protocol=fedavg"
    )
    with pretended(monkeypatch), pytest.raises(FedmqError, match="same device"):
        in_process_run.run(scenario, tmp_path)


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


@real
def test_every_method_gives_the_same_model_twice_on_a_real_gpu_and_nearly_the_cpus(file: Path, tmp_path: Path) -> None:
    for name in protocols.names():
        check(resolved(file, "rounds=3", f"protocol={name}", *fitting(name)), tmp_path / name)


@real
def test_every_base_gives_the_same_model_twice_on_a_real_gpu_and_nearly_the_cpus(file: Path, tmp_path: Path) -> None:
    for base in BASES:
        settings = ["rounds=2", "protocol=moon", f"objective={{base: {base}, bits: 8, hidden: 16}}"]
        check(resolved(file, *settings, "evaluation.gallery=database"), tmp_path / base)


@real
def test_a_released_model_embeds_on_a_real_gpu_nearly_as_on_the_cpu(file: Path, tmp_path: Path) -> None:
    in_process_run.run(resolved(file, "rounds=1"), tmp_path)
    here = export(open_release(tmp_path, "cpu")).array("image").copy()
    there = export(open_release(tmp_path, "cuda:0")).array("image")
    np.testing.assert_allclose(there, here, atol=1e-5)
