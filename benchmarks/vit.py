"""Local training of ViT-B-32 with adapters in every block, compared with a plain PyTorch loop; uses a GPU if any."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from open_clip.model import CLIP
from torch import Tensor, nn

import protocols
from benchmarks.clip_models import MEAN, STD, ClipModel, clip_model, synthetic_dataset
from benchmarks.measure import Number, Result, spread
from fedmq.config.scenario import Backbone, ProtocolChoice, Training
from fedmq.data.silo_dataset import SiloDataset
from fedmq.encoders.base import InputSpec
from fedmq.encoders.clip_weights import config_of
from fedmq.encoders.gpu import make_gpu_repeatable
from fedmq.federation.protocol import Context, Local, SiloFacts, Task, Trained
from fedmq.models.build import build
from fedmq.wire.payloads import Model

WIDTH, TAU, RATE = 64, 0.07, 1e-4
Rows = npt.NDArray[np.int64]


class _Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, WIDTH), nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.up(F.gelu(self.down(x)))
        return x + changed


def _bare(clip_model: ClipModel, dataset: SiloDataset, batch: int, device: str) -> tuple[Callable[[Rows], float], int]:
    """A plain loop over one epoch that returns its seconds, and the number of trained parameters."""
    assert dataset.image is not None and dataset.text is not None
    images, texts = dataset.image, dataset.text[:, 0]
    model: Any = CLIP(**config_of(clip_model.name)).eval().requires_grad_(False).to(device)
    trained = nn.ModuleList()
    for transformer in (model.visual.transformer, model.transformer):
        for block in transformer.resblocks:
            adapter = _Bottleneck(transformer.width).to(device)
            block.register_forward_hook(lambda _block, _inputs, output, adapter=adapter: adapter(output))
            trained.append(adapter)
    dim = clip_model.dim
    heads = [nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)).to(device) for _ in range(2)]
    trained.extend(heads)
    mean, std = (255 * torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, STD))

    def epoch(order: Rows) -> float:
        began = time.perf_counter()
        optimiser = torch.optim.AdamW(trained.parameters(), lr=RATE, weight_decay=0.01, fused=True)
        for start in range(0, len(order), batch):
            rows = torch.from_numpy(order[start : start + batch])
            pixels, tokens = images[rows].to(device), texts[rows].to(device).long()
            image = F.normalize(heads[0](model.encode_image((pixels.float() - mean) / std)), dim=-1)
            text = F.normalize(heads[1](model.encode_text(tokens)), dim=-1)
            scores, target = image @ text.T / TAU, torch.arange(len(rows), device=device)
            loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        float(loss.detach())  # waits for the GPU
        return time.perf_counter() - began

    return epoch, sum(each.numel() for each in trained.parameters())


def silo_task(
    clip_model: ClipModel,
    dataset: SiloDataset,
    batch: int,
    device: str,
    cache: Path,
    *,
    optimizer: Literal["adamw", "sgd"] = "adamw",
) -> tuple[Callable[[], Trained], int]:
    """A FedAvg task of a paired silo, from download to update, and the number of trained parameters."""
    edge = clip_model.edge
    inputs = InputSpec((3, edge, edge), (77,), "uint8", "int32", MEAN, STD)
    backbone = Backbone(name=clip_model.name, adapter_site="blocks", bottleneck=WIDTH, head="mlp")
    model = build(backbone, inputs, 0, device=device, cache=cache)
    silo = SiloFacts("silo-00", 0, True, True)
    training = Training(optimizer=optimizer, batch_size=batch, local_epochs=1, weight_decay=0.01)
    context = Context(0, 100, (silo,), model.layout, model.dim, training)
    method = protocols.create(ProtocolChoice(name="fedavg", single_modality="idle"), context)  # no prototypes
    start = Model(layout_digest=model.layout.digest, buffer=model.initial().cpu().numpy())
    tasks = iter(range(1, 1000))

    def task() -> Trained:
        number = next(tasks)
        return method.train(Local(silo, dataset, model, {}), Task(number, 0, 0, RATE, (start,)))

    return task, model.flat.numel()


def _fastest() -> None:
    """Restore PyTorch's defaults, which :func:`make_gpu_repeatable` changes for the process, for the plain loop."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.allow_tf32 = True


@dataclass(frozen=True)
class Rates:
    """Training rates of a silo and of the plain loop, measured alternately."""

    silo: tuple[float, ...]  # of each repeat [samples/s]
    bare: tuple[float, ...]  # likewise
    parameters: int  # trained by the silo
    same: bool  # whether the plain loop trains as many

    @property
    def multiples(self) -> list[float]:
        """The silo's rate as a multiple of the plain loop's."""
        return [ours / theirs for ours, theirs in zip(self.silo, self.bare, strict=True)]


def training_rates(clip_model: ClipModel, n: int, batch: int, repeats: int, device: str, cache: Path) -> Rates:
    """Measure both on n synthetic pairs, after an epoch of each to warm up."""
    dataset, generator = synthetic_dataset(clip_model, n), np.random.default_rng(1)
    task, parameters = silo_task(clip_model, dataset, batch, device, cache)
    bare, same = _bare(clip_model, dataset, batch, device)

    def silo(_order: Rows) -> float:
        began = time.perf_counter()
        task()
        return time.perf_counter() - began

    rates: dict[str, list[float]] = {"silo": [], "bare": []}
    for number in range(repeats + 1):
        order = generator.permutation(n)
        for name, kernels, epoch in (("silo", make_gpu_repeatable, silo), ("bare", _fastest, bare)):
            if device != "cpu":
                kernels()
            took = epoch(order)
            if number:  # the first warms up
                rates[name].append(n / took)
    return Rates(tuple(rates["silo"]), tuple(rates["bare"]), parameters, same == parameters)


def run(*, smoke: bool = False) -> Result:
    """Measure both alternately; ``smoke``: once, with a tiny model."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    n, batch = (2048, 128) if device != "cpu" else (2, 2)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        chosen = clip_model(folder, smoke=smoke)
        rates = training_rates(chosen, n, batch, 1 if smoke else 3, device, folder)
    return Result(
        "vit",
        (
            spread("a silo's task, from download to update", rates.silo, "samples/s"),
            spread("a plain PyTorch loop", rates.bare, "samples/s"),
            spread("as a multiple of the plain loop", rates.multiples, "x", "at least 0.98"),
            Number("trained parameters", rates.parameters, ""),
        ),
        (
            f"{Path(chosen.name).stem}, random weights, adapters of {WIDTH} in every block",
            f"{n} synthetic pairs in batches of {batch}, {device}",
            f"the plain loop trains {'the same number of' if rates.same else 'another number of'} parameters",
        ),
    )
