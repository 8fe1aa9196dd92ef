"""Snapshots of local training between two epochs, from which an interrupted task continues bit-identically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedmq.federation.protocol import Local, Task
from fedmq.models.optimiser import FusedOptimiser
from fedmq.packages import versions

_TASK, _ORDER, _DROPOUT, _MODEL, _SUMS = "task", "order", "dropout", "model", "sums"


def _bytes(value: object) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


class Snapshots:
    """Snapshots of one task: all that its following epochs depend on, as tensors on the CPU.

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
        self._store = local.epochs
        self._local, self._task, self._base = local, task, base
        self._optimisers, self._generator, self._dropout = optimisers, generator, dropout

    def resume(self, total: Tensor) -> tuple[int, Tensor, int]:
        """Number of epochs done, sum of their losses (float64 [], on the device of ``total``) and their samples.

        A snapshot of another task is ignored; the store has checked its digest.
        """
        saved = {} if self._store is None else self._store.load()
        if self._store is None or not saved or not torch.equal(saved[_TASK], self._identity()):
            return 0, total, 0
        epochs, self._generator.bit_generator.state = json.loads(bytes(saved[_ORDER].numpy()))
        self._dropout.set_state(saved[_DROPOUT])
        self._local.model.load(saved[_MODEL].numpy())
        for name, optimiser in self._optimisers.items():
            start = f"{name}."
            optimiser.restore({key.removeprefix(start): each for key, each in saved.items() if key.startswith(start)})
        self._store.resumed(epochs)
        return epochs, saved[_SUMS][0].to(total.device), int(saved[_SUMS][1])

    def keep(self, epochs: int, total: Tensor, seen: int) -> None:
        """Keep a snapshot after a number of epochs, if that is due."""
        if self._store is not None:
            self._store.save(lambda: self._taken(epochs, total, seen))

    def _taken(self, epochs: int, total: Tensor, seen: int) -> Mapping[str, Tensor]:
        tensors = {
            _TASK: self._identity(),
            _ORDER: _bytes([epochs, self._generator.bit_generator.state]),
            _DROPOUT: self._dropout.get_state(),
            _MODEL: self._local.model.flat.detach().cpu().clone(),
            _SUMS: torch.tensor([float(total), float(seen)], dtype=torch.float64),
        }
        for name, optimiser in self._optimisers.items():
            tensors |= {f"{name}.{key}": value for key, value in optimiser.state().items()}
        return tensors

    def _identity(self) -> Tensor:
        """What a snapshot belongs to: the silo, the task, the parameters that it starts from, and the software."""
        digest = hashlib.sha256(self._base.cpu().contiguous().numpy().tobytes()).hexdigest()
        task = self._task
        facts = [self._local.silo.name, task.sequence, task.base_version, task.round, task.learning_rate, digest]
        return _bytes([*facts, versions()])
