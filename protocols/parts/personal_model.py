"""Helpers for methods with personal models, and for methods that compare with the outputs of other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmq.config.sections import Modality
from fedmq.federation import protocol
from fedmq.federation.protocol import Encoders, Local, take
from fedmq.models.hash_networks import Tower
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Model, Payload
from protocols.parts import training

#: Name of a silo's personal parameters [P], or its personal layers, in the silo's state.
OWN = "own_model"

#: Maximum number of inputs (items times captions) whose outputs a reference caches: 64 MB at 4,096 numbers each.
KEPT = 4096


def own_parameters(local: Local) -> Tensor:
    """The silo's personal model float32 [P] after its last task; the initial parameters before the first."""
    personal = local.state.get(OWN)
    return local.model.initial() if personal is None else personal


def kept(local: Local) -> dict[str, Tensor]:
    """Copy the silo's current model for its state."""
    return {OWN: local.model.flat.detach().cpu().clone()}


def kept_or_before(local: Local, *, newest: bool) -> dict[str, Tensor]:
    """:func:`kept` if the silo trained (``newest``); otherwise its model is the download, so the old one is kept."""
    return kept(local) if newest else {name: tensor for name, tensor in local.state.items() if name == OWN}


def encoders_of(local: Local, theta: Tensor | npt.NDArray[Any]) -> Encoders:
    """Encoders of the silo's model with parameters [P], for evaluation."""
    local.model.load(theta)
    return protocol.encoders_of(local.model)


def last_encoders(local: Local, payloads: Sequence[Payload]) -> Encoders:
    """Encoders of the silo's model after its last training; of the global model before the first."""
    personal = local.state.get(OWN)
    return encoders_of(local, take(payloads, Model).buffer if personal is None else personal)


def unsharpened(local: Local, image: Out | None, text: Out | None) -> training.Outs:
    """A step's outputs with codes of sharpness 1, for comparison with codes computed outside training.

    DJSRH and JDSH increase the sharpness of codes during training, while banks and prototypes hold codes of sharpness
    1. Comparing the two would pull the inputs of tanh towards 0 even if they agree. Other bases' outputs are unchanged.

    Args:
        local: the silo.
        image: output of its image tower; None if the tower was not run.
        text: output of its text tower; None if the tower was not run.
    """
    return _plain(image, local.model.visual), _plain(text, local.model.text)


def _plain(out: Out | None, tower: nn.Module) -> Out | None:
    if out is None or not isinstance(tower, Tower) or tower.sharpness == 1.0 or not tower.plan.tanh:
        return out
    return replace(out, code=torch.tanh(out.raw))


@dataclass(frozen=True)
class Reference:
    """Outputs of other parameters on a silo's batches, without gradient and dropout.

    Neither the parameters nor the silo's items change within a task. So a modality's outputs are computed once and
    cached if that is less work than computing them per batch (more epochs than captions per item; for images, more than
    one epoch) and they fit in :data:`KEPT` inputs.

    Args:
        local: the silo.
        theta: float32 [P], the other parameters.
        epochs: passes over the silo's items in a task.
    """

    local: Local
    theta: Tensor
    epochs: int

    def __call__(self, step: training.Step) -> training.Outs:
        """Image and text outputs of a step's batch; None for a tower that the step does not run or the silo lacks."""
        dataset, model = self.local.dataset, self.local.model
        cached: list[Modality] = [name for name in step.runs if self._cached(name)]
        computed = [name for name in step.runs if name not in cached]
        image: Out | None = None
        text: Out | None = None
        if computed:
            with training.parameters(self.local, self.theta), torch.no_grad():
                image, text = training.outputs(self.local, step.rows, step.caption, computed)
        rows = torch.from_numpy(step.rows)
        if "image" in cached and dataset.image is not None:
            image = _picked(self._images, rows, model.visual)
        if "text" in cached and dataset.text is not None and step.caption is not None:
            text = _picked(self._texts, dataset.text.rows(rows, torch.from_numpy(step.caption[step.rows])), model.text)
        return image, text

    def _cached(self, modality: Modality) -> bool:
        """Whether the outputs of a modality are computed once and cached."""
        dataset = self.local.dataset
        if modality == "image" or dataset.text is None:
            return self.epochs > 1 and len(dataset) <= KEPT
        return self.epochs > int(dataset.captions.max()) and len(dataset.text.values) <= KEPT

    @cached_property
    def _images(self) -> Out:
        return self._all_outputs("image", self.local.dataset.image)

    @cached_property
    def _texts(self) -> Out:
        text = self.local.dataset.text
        return self._all_outputs("text", None if text is None else text.values)

    def _all_outputs(self, modality: Modality, items: Tensor | None) -> Out:
        if items is None:
            raise ValueError(f"the silo has no {modality} items")
        with training.parameters(self.local, self.theta):
            parts = list(training.in_blocks(self.local.model, modality, items))
        logits = [part.logits for part in parts if part.logits is not None]
        hidden, raw, code = (torch.cat([getattr(part, name) for part in parts]) for name in ("hidden", "raw", "code"))
        return Out(hidden, raw, code, torch.cat(logits) if logits else None)


def _picked(out: Out, rows: Tensor, tower: nn.Module) -> Out:
    rows = rows.to(out.code.device)
    hidden, raw, code = out.hidden[rows], out.raw[rows], out.code[rows]
    if isinstance(tower, Tower) and tower.sharpness != 1.0:
        # The sharpness grows with every epoch (DJSRH, JDSH), and the cached codes are from the task's first epoch.
        code = tower.squashed(raw)
    return Out(hidden, raw, code, None if out.logits is None else out.logits[rows])
