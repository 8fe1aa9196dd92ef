"""Local training of ViT-B-32 with adapters in every block, compared with a plain PyTorch loop; uses a GPU if any."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protocols
from benchmarks.measure import Number, Result, spread
from fedmq.config.scenario import Backbone, ProtocolChoice, Training
from fedmq.data.silo_dataset import CaptionRows, SiloDataset
from fedmq.encoders import clip
from fedmq.encoders.base import InputSpec
from fedmq.encoders.gpu import repeatable
from fedmq.federation.protocol import Context, Local, SiloFacts, Task
from fedmq.models.build import build
from fedmq.wire.payloads import Model

NAME, EDGE, WIDTH, TAU, RATE = "ViT-B-32", 224, 64, 0.07, 1e-4
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
Rows = npt.NDArray[np.int64]


def _dataset(n: int) -> SiloDataset:
    """A silo dataset of n synthetic pictures, each with one synthetic caption."""
    generator = np.random.default_rng(0)
    texts = [" ".join(f"word{number}" for number in generator.integers(0, 500, 8)) for _ in range(n)]
    return SiloDataset(
        image=torch.from_numpy(generator.integers(0, 256, (n, 3, EDGE, EDGE), dtype=np.uint8)),
        text=CaptionRows(torch.from_numpy(clip.tokenise(NAME, texts)), torch.arange(n)),
        captions=torch.ones(n, dtype=torch.int64),
        labels=None,
        rows=torch.arange(n),
    )


class _Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, WIDTH), nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.up(F.gelu(self.down(x)))
        return x + changed


def _bare(share: SiloDataset, batch: int, device: str) -> tuple[Callable[[Rows], float], int]:
    """A plain loop over one epoch that returns its seconds, and the number of trained parameters."""
    assert share.image is not None and share.text is not None
    images, texts = share.image, share.text[:, 0]
    model: Any = open_clip.create_model(NAME).eval().requires_grad_(False).to(device)
    trained = nn.ModuleList()
    for transformer in (model.visual.transformer, model.transformer):
        for block in transformer.resblocks:
            adapter = _Bottleneck(transformer.width).to(device)
            block.register_forward_hook(lambda _block, _inputs, output, adapter=adapter: adapter(output))
            trained.append(adapter)
    heads = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(device) for _ in range(2)]
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


def _silo(share: SiloDataset, batch: int, device: str, cache: Path) -> tuple[Callable[[Rows], float], int]:
    """Like :func:`_bare`, for a FedAvg task of a paired silo, from download to update; draws its own order."""
    inputs = InputSpec((3, EDGE, EDGE), (77,), "uint8", "int32", MEAN, STD)
    backbone = Backbone(name=NAME, adapter_site="blocks", bottleneck=WIDTH, head="mlp")
    model = build(backbone, inputs, 0, device=device, cache=cache)
    silo = SiloFacts("silo-00", 0, True, True)
    training = Training(batch_size=batch, local_epochs=1, weight_decay=0.01)
    context = Context(0, 100, (silo,), model.layout, model.dim, training)
    method = protocols.create(ProtocolChoice(name="fedavg", single_modality="idle"), context)  # no prototypes
    start = Model(layout_digest=model.layout.digest, buffer=model.initial().cpu().numpy())
    tasks = iter(range(1, 1000))

    def epoch(_order: Rows) -> float:
        task = Task(next(tasks), 0, 0, RATE, (start,))
        began = time.perf_counter()
        method.train(Local(silo, share, model, {}), task)
        return time.perf_counter() - began

    return epoch, model.flat.numel()


def _fastest() -> None:
    """Restore PyTorch's defaults, which :func:`repeatable` changes for the process, for the plain loop."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.allow_tf32 = True


def run(repeats: int = 5) -> Result:
    """Measure both alternately."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    n, batch = (2048, 128) if device != "cpu" else (32, 16)
    share, generator = _dataset(n), np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        silo, parameters = _silo(share, batch, device, Path(folder))
        bare, same = _bare(share, batch, device)
        seconds: dict[str, list[float]] = {"silo": [], "bare": []}
        for number in range(repeats + 1):
            order = generator.permutation(n)
            for name, kernels, epoch in (("silo", repeatable, silo), ("bare", _fastest, bare)):
                if device != "cpu":
                    kernels()
                took = epoch(order)
                if number:  # the first warms up
                    seconds[name].append(took)
    rates = {name: [n / each for each in times] for name, times in seconds.items()}
    multiples = [ours / theirs for ours, theirs in zip(rates["silo"], rates["bare"], strict=True)]
    return Result(
        "vit",
        (
            spread("a silo's task, from download to update", rates["silo"], "samples/s"),
            spread("a plain PyTorch loop", rates["bare"], "samples/s"),
            spread("as a multiple of the plain loop", multiples, "x", "at least 0.95 on a GPU"),
            Number("trained parameters", parameters, ""),
        ),
        (
            f"{NAME}, random weights, adapters of {WIDTH} in every block",
            f"{n} synthetic pairs in batches of {batch}, {device}",
            f"the plain loop trains {'the same number of' if same == parameters else same} parameters",
        ),
    )
