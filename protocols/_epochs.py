"""Snapshots of local training between two epochs, from which an interrupted task continues bit-identically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedmq.federation.protocol import EpochStore, Local, Task
from fedmq.models.optimiser import FusedOptimiser
from fedmq.models.two_tower import TwoTower

_TASK, _ORDER, _DROPOUT, _MODEL, _SUMS = "task", "order", "dropout", "model", "sums"


def identity_of(local: Local, task: Task, base: Tensor) -> Tensor:
    """What a snapshot belongs to, uint8: the silo, the task, and a digest of the parameters that it starts from."""
    digest = hashlib.sha256(base.cpu().contiguous().numpy().tobytes()).hexdigest()
    facts = [local.silo.name, task.sequence, task.base_version, task.round, task.learning_rate, digest]
    return _bytes(facts)


def snapshot(
    identity: Tensor,
    epochs: int,
    model: TwoTower,
    optimisers: Mapping[str, FusedOptimiser],
    generator: np.random.Generator,
    dropout: torch.Generator,
    sums: Tensor,
) -> dict[str, Tensor]:
    """All that the following epochs depend on, as tensors on the CPU.

    Args:
        identity: from :func:`identity_of`.
        epochs: number of epochs done.
        model: the silo's model.
        optimisers: optimisers of the branches that it trains, by name.
        generator: generator of the order of samples and the choice of captions.
        dropout: generator of dropout masks.
        sums: float64 [2], sum of losses and number of samples so far.
    """
    found = {
        _TASK: identity,
        _ORDER: _bytes([epochs, generator.bit_generator.state]),
        _DROPOUT: dropout.get_state(),
        _MODEL: model.flat.detach().cpu().clone(),
        _SUMS: sums.cpu(),
    }
    for name, each in optimisers.items():
        found |= {f"{name}.{key}": value for key, value in each.state().items()}
    return found


def restore(
    saved: Mapping[str, Tensor],
    identity: Tensor,
    model: TwoTower,
    optimisers: Mapping[str, FusedOptimiser],
    generator: np.random.Generator,
    dropout: torch.Generator,
) -> tuple[int, Tensor] | None:
    """Continue from a snapshot; arguments as in :func:`snapshot`.

    Returns:
        The number of epochs done and the sums; None, and nothing is changed, if the snapshot is of another task.
    """
    if not torch.equal(saved.get(_TASK, torch.empty(0, dtype=torch.uint8)), identity):
        return None
    epochs, order = json.loads(bytes(saved[_ORDER].numpy()))
    generator.bit_generator.state = order
    dropout.set_state(saved[_DROPOUT])
    model.load(saved[_MODEL].numpy())
    for name, each in optimisers.items():
        prefix = f"{name}."
        each.restore({key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)})
    return int(epochs), saved[_SUMS]


def _bytes(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


class Snapshots:
    """Snapshots of one task.

    Args:
        local: the silo; without ``local.epochs`` nothing is kept.
        task: its task.
        base: float32 [P] parameters before training.
        optimisers: optimisers of the branches that it trains, by name.
        generator: generator of the order of samples and the choice of captions.
        dropout: generator of dropout masks.
    """

    def __init__(
        self,
        local: Local,
        task: Task,
        base: Tensor,
        optimisers: Mapping[str, FusedOptimiser],
        generator: np.random.Generator,
        dropout: torch.Generator,
    ) -> None:
        self._store: EpochStore | None = local.epochs
        self._local, self._task, self._base = local, task, base
        self._optimisers, self._generator, self._dropout = optimisers, generator, dropout

    def resume(self, total: Tensor) -> tuple[int, Tensor, int]:
        """Number of epochs done, sum of their losses (float64 [], on the device of ``total``) and their samples."""
        saved = {} if self._store is None else self._store.load()
        if saved:
            identity = identity_of(self._local, self._task, self._base)
            resumed = restore(saved, identity, self._local.model, self._optimisers, self._generator, self._dropout)
            if resumed is not None and self._store is not None:
                epochs, sums = resumed
                self._store.resumed(epochs)
                return epochs, sums[0].to(total.device), int(sums[1])
        return 0, total, 0

    def keep(self, epochs: int, total: Tensor, seen: int) -> None:
        """Keep a snapshot after a number of epochs, if that is due."""
        if self._store is not None:
            self._store.save(lambda: self._taken(epochs, total, seen))

    def _taken(self, epochs: int, total: Tensor, seen: int) -> Mapping[str, Tensor]:
        identity = identity_of(self._local, self._task, self._base)
        sums = torch.tensor([float(total), float(seen)], dtype=torch.float64)
        return snapshot(identity, epochs, self._local.model, self._optimisers, self._generator, self._dropout, sums)
