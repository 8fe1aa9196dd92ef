"""Snapshots of local training between two epochs, from which an interrupted task continues bit-identically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

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
    tensors = {
        _TASK: identity,
        _ORDER: _bytes([epochs, generator.bit_generator.state]),
        _DROPOUT: dropout.get_state(),
        _MODEL: model.flat.detach().cpu().clone(),
        _SUMS: sums.cpu(),
    }
    for name, optimiser in optimisers.items():
        tensors |= {f"{name}.{key}": value for key, value in optimiser.state().items()}
    return tensors


def restore(
    saved: Mapping[str, Tensor],
    identity: Tensor,
    epochs: int,
    model: TwoTower,
    optimisers: Mapping[str, FusedOptimiser],
    generator: np.random.Generator,
    dropout: torch.Generator,
) -> tuple[int, Tensor] | None:
    """Continue from a snapshot.

    Args:
        saved: the snapshot.
        identity: from :func:`identity_of`.
        epochs: number of epochs of the task.
        model: the silo's model.
        optimisers: optimisers of the branches that it trains, by name.
        generator: generator of the order of samples and the choice of captions.
        dropout: generator of dropout masks.

    Returns:
        The number of epochs done and the sums; None, and nothing is changed, if the snapshot is of another task, or
        not one that :func:`snapshot` could have made of it.
    """
    if not torch.equal(saved.get(_TASK, torch.empty(0, dtype=torch.uint8)), identity):
        return None
    now = snapshot(identity, 0, model, optimisers, generator, dropout, torch.zeros(2, dtype=torch.float64))
    order = _order_of(saved, generator)
    if order is None or not 0 < order[0] < epochs or not _is_alike(saved, now):
        return None
    generator.bit_generator.state = order[1]
    dropout.set_state(saved[_DROPOUT])
    model.load(saved[_MODEL].numpy())
    for name, optimiser in optimisers.items():
        prefix = f"{name}."
        optimiser.restore({key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)})
    return order[0], saved[_SUMS]


def _order_of(saved: Mapping[str, Tensor], generator: np.random.Generator) -> tuple[int, Mapping[str, Any]] | None:
    """The number of epochs done and the state of the generator of the order; None if the snapshot has none."""
    try:
        epochs, state = json.loads(bytes(saved[_ORDER].numpy()))
        type(generator.bit_generator)(0).state = state
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    return (epochs, state) if type(epochs) is int else None


def _is_alike(saved: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> bool:
    """Whether a snapshot has the tensors of one taken now, with finite values; a momentum exists after a step only."""
    for name in saved.keys() | now.keys():
        like = now.get(name, now.get(name.replace(".momentum.", ".first.")))
        given = saved.get(name)
        if like is None or given is None or given.dtype != like.dtype:
            return False
        if name != _ORDER and (given.shape != like.shape or not bool(torch.isfinite(given).all())):
            return False
    try:
        torch.Generator().set_state(saved[_DROPOUT])
    except RuntimeError:
        return False
    return bool(saved[_SUMS][1] >= 0)  # a loss may be negative, a number of samples not


def _bytes(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


class Snapshots:
    """Snapshots of one task.

    Args:
        local: the silo; without ``local.epochs`` nothing is kept.
        task: its task.
        base: float32 [P] parameters before training.
        epochs: number of epochs of the task.
        optimisers: optimisers of the branches that it trains, by name.
        generator: generator of the order of samples and the choice of captions.
        dropout: generator of dropout masks.
    """

    def __init__(
        self,
        local: Local,
        task: Task,
        base: Tensor,
        epochs: int,
        optimisers: Mapping[str, FusedOptimiser],
        generator: np.random.Generator,
        dropout: torch.Generator,
    ) -> None:
        self._store: EpochStore | None = local.epochs
        self._local, self._task, self._base, self._epochs = local, task, base, epochs
        self._optimisers, self._generator, self._dropout = optimisers, generator, dropout

    def resume(self, total: Tensor) -> tuple[int, Tensor, int]:
        """Number of epochs done, sum of their losses (float64 [], on the device of ``total``) and their samples."""
        saved = {} if self._store is None else self._store.load()
        if saved:
            identity = identity_of(self._local, self._task, self._base)
            parts = self._local.model, self._optimisers, self._generator, self._dropout
            resumed = restore(saved, identity, self._epochs, *parts)
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
