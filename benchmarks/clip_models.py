"""Models and synthetic data for the benchmarks of ViT-B-32: noise images, each with a caption of random words."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedmq.data.silo_dataset import CaptionRows, SiloDataset
from fedmq.encoders import clip

#: Statistics of the images, for the silo and for the plain loop.
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
#: A model with ViT-B-32's parts that takes a thousandth of its time.
_TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


@dataclass(frozen=True)
class ClipModel:
    """A model of open_clip."""

    name: str = "ViT-B-32"  # of the model, or path of its .json configuration
    edge: int = 224  # of its images [pixels]
    dim: int = 512  # of its embeddings


def clip_model(folder: Path, *, smoke: bool) -> ClipModel:
    """ViT-B-32; ``smoke``: a tiny model whose configuration is written into the folder."""
    if not smoke:
        return ClipModel()
    path = folder / "tiny.json"
    path.write_text(json.dumps(_TINY), encoding="utf-8")
    return ClipModel(str(path), 32, 32)


def _captions(n: int, generator: np.random.Generator) -> list[str]:
    return [" ".join(f"word{number}" for number in generator.integers(0, 500, 8)) for _ in range(n)]


def synthetic_dataset(model: ClipModel, n: int) -> SiloDataset:
    """A silo dataset of n images, each with one caption."""
    generator = np.random.default_rng(0)
    texts = _captions(n, generator)
    return SiloDataset(
        image=torch.from_numpy(generator.integers(0, 256, (n, 3, model.edge, model.edge), dtype=np.uint8)),
        text=CaptionRows(torch.from_numpy(clip.tokenise(model.name, texts)), torch.arange(n)),
        captions=torch.ones(n, dtype=torch.int64),
        labels=None,
        rows=torch.arange(n),
    )


def synthetic_manifest(folder: Path, n: int) -> Path:
    """Write n images of 64 x 64 and their captions as a manifest; returns its path."""
    generator = np.random.default_rng(0)
    images = folder / "images"
    images.mkdir()
    path = folder / "list.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "captions"])
        for number, caption in enumerate(_captions(n, generator)):
            name = f"images/{number:05d}.png"
            Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / name)
            writer.writerow([name, caption])
    return path
