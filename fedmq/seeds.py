"""Random seeds: all draws of a run derive from the scenario's seed and a path that names the draw."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, *path: str | int) -> int:
    """Derive a seed, from 0 and below 2**63, from the scenario's seed and a path.

    Parts are length-prefixed and typed before hashing, so ``("a", "bc")``, ``("ab", "c")`` and ``(1,)`` against
    ``("1",)`` all differ.

    Args:
        seed: the scenario's seed.
        path: name of the draw, e.g. ``("participation", round)``.
    """
    digest = hashlib.sha256(b"fedmq-seed")
    for part in (seed, *path):
        kind, text = (b"i", str(part)) if isinstance(part, int) else (b"s", part)
        raw = text.encode()
        digest.update(kind + len(raw).to_bytes(4, "big") + raw)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def numpy_generator(seed: int, *path: str | int) -> np.random.Generator:
    """A NumPy generator seeded for ``path``."""
    return np.random.default_rng(derive(seed, *path))


def torch_generator(seed: int, *path: str | int) -> torch.Generator:
    """A CPU torch generator seeded for ``path``."""
    import torch  # noqa: PLC0415 - the audit of message logs does without torch

    return torch.Generator().manual_seed(derive(seed, *path))
