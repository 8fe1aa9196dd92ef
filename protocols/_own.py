"""What methods share whose silos keep models of their own, or compare with what other or earlier models made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmq.models.networks import Tower
from fedmq.models.two_tower import Modality, Out, TwoTower
from fedmq.protocol import Encoders, Local
from protocols import _local

#: Name of a silo's own parameters [P], or its own part of them, among its personal tensors.
OWN = "own_model"

#: Most inputs (items times captions) whose outputs a reference keeps: 64 MB of 4,096 numbers each.
KEPT = 4096


def own_parameters(local: Local) -> Tensor:
    """The silo's own whole model float32 [P]: that of its last task, before the first the initial one."""
    own = local.state.get(OWN)
    return local.model.initial() if own is None else own


def kept(local: Local) -> dict[str, Tensor]:
    """The silo's whole model as it is now, for its personal state."""
    return {OWN: local.model.flat.detach().cpu().clone()}


def encoders_of(local: Local, theta: Tensor | npt.NDArray[Any]) -> Encoders:
    """The silo's model with parameters [P] as what it is measured by."""
    model = local.model
    model.load(theta)
    device = model.flat.device
    return Encoders(lambda x: model.image(x.to(device)), lambda x: model.caption(x.to(device)))


def unsharpened(local: Local, image: Out | None, text: Out | None) -> _local.Outs:
    """A step's outputs with codes as they are outside training, for a comparison with what was made there.

    DJSRH and JDSH train ever sharper codes. Banks and prototypes are of codes of sharpness 1: compared with the sharp
    ones they would pull back what enters tanh, the more the sharper, even where it is the very same. Everywhere else
    the outputs are what they were.

    Args:
        local: the silo.
        image: of its image tower; None for what the step does not run or the silo lacks.
        text: likewise.
    """
    return _plain(image, local.model.visual), _plain(text, local.model.text)


def _plain(out: Out | None, tower: nn.Module) -> Out | None:
    if out is None or not isinstance(tower, Tower) or tower.sharpness == 1.0 or not tower.plan.tanh:
        return out
    return replace(out, code=torch.tanh(out.raw))


@dataclass(frozen=True)
class Reference:
    """What other parameters make of a silo's batches, without gradient and without dropout.

    Neither they nor the silo's items change within a task. Where that is less work than batch after batch (more epochs
    than captions per item) and takes little memory, all items go through once, before the first batch.

    Args:
        local: the silo.
        theta: float32 [P], the other parameters.
        epochs: how often a task goes through the silo's items.
    """

    local: Local
    theta: Tensor
    epochs: int

    def __call__(self, step: _local.Step) -> _local.Outs:
        """Image and text outputs of a step's batch; None for what the step does not run or the silo lacks."""
        share = self.local.share
        captions = 1 if share.text is None else share.text.shape[1]
        if self.epochs <= captions or len(share) * captions > KEPT:
            with _local.parameters(self.local, self.theta), torch.no_grad():
                return _local.outputs(self.local, step.rows, step.caption, step.runs)
        image, text = self._all
        visual, textual = self.local.model.visual, self.local.model.text
        rows = torch.from_numpy(step.rows)
        found = None if image is None or "image" not in step.runs else _picked(image, rows, visual)
        if text is None or step.caption is None or "text" not in step.runs:
            return found, None
        return found, _picked(text, rows * captions + torch.from_numpy(step.caption[step.rows]), textual)

    @cached_property
    def _all(self) -> _local.Outs:
        share, model = self.local.share, self.local.model
        with _local.parameters(self.local, self.theta):
            image = None if share.image is None else _whole(model, "image", share.image)
            return image, None if share.text is None else _whole(model, "text", share.text.flatten(0, 1))


def _whole(model: TwoTower, modality: Modality, items: Tensor) -> Out:
    parts = list(_local.in_blocks(model, modality, items))
    logits = [part.logits for part in parts if part.logits is not None]
    hidden, raw, code = (torch.cat([getattr(part, name) for part in parts]) for name in ("hidden", "raw", "code"))
    return Out(hidden, raw, code, torch.cat(logits) if logits else None)


def _picked(out: Out, rows: Tensor, tower: nn.Module) -> Out:
    rows = rows.to(out.code.device)
    hidden, raw, code = out.hidden[rows], out.raw[rows], out.code[rows]
    if isinstance(tower, Tower) and tower.sharpness != 1.0:
        # It grows from epoch to epoch (DJSRH, JDSH), and these outputs are of the task's first.
        code = tower.squashed(raw)
    return Out(hidden, raw, code, None if out.logits is None else out.logits[rows])
