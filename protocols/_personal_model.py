"""What methods share whose silos keep models of their own, or compare with what other or earlier models made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmq.config.parts import Modality
from fedmq.federation import protocol
from fedmq.federation.protocol import Encoders, Local, take
from fedmq.models.hash_networks import Tower
from fedmq.models.two_tower import Out
from fedmq.wire.messages import Model, Payload
from protocols import _training

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


def kept_or_before(local: Local, *, newest: bool) -> dict[str, Tensor]:
    """:func:`kept` of a silo that has trained; one that has not holds the download, and keeps what it had, if any."""
    return kept(local) if newest else {name: own for name, own in local.state.items() if name == OWN}


def encoders_of(local: Local, theta: Tensor | npt.NDArray[Any]) -> Encoders:
    """The silo's model with parameters [P] as what it is measured by."""
    local.model.load(theta)
    return protocol.encoders_of(local.model)


def last_encoders(local: Local, payloads: Sequence[Payload]) -> Encoders:
    """The silo's model as its last training left it; the global one before the first."""
    own = local.state.get(OWN)
    return encoders_of(local, take(payloads, Model).buffer if own is None else own)


def unsharpened(local: Local, image: Out | None, text: Out | None) -> _training.Outs:
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
    than captions per item; of images, more than one) and takes little memory, all inputs of a modality go through once,
    before the first batch.

    Args:
        local: the silo.
        theta: float32 [P], the other parameters.
        epochs: how often a task goes through the silo's items.
    """

    local: Local
    theta: Tensor
    epochs: int

    def __call__(self, step: _training.Step) -> _training.Outs:
        """Image and text outputs of a step's batch; None for what the step does not run or the silo lacks."""
        share, model = self.local.share, self.local.model
        kept: list[Modality] = [name for name in step.runs if self._once(name)]
        anew = [name for name in step.runs if name not in kept]
        image: Out | None = None
        text: Out | None = None
        if anew:
            with _training.parameters(self.local, self.theta), torch.no_grad():
                image, text = _training.outputs(self.local, step.rows, step.caption, anew)
        rows = torch.from_numpy(step.rows)
        if "image" in kept and share.image is not None:
            image = _picked(self._images, rows, model.visual)
        if "text" in kept and share.text is not None and step.caption is not None:
            text = _picked(
                self._texts, rows * share.text.shape[1] + torch.from_numpy(step.caption[step.rows]), model.text
            )
        return image, text

    def _once(self, modality: Modality) -> bool:
        """Whether all inputs of a modality go through once."""
        text = self.local.share.text
        captions = 1 if modality == "image" or text is None else text.shape[1]
        return self.epochs > captions and len(self.local.share) * captions <= KEPT

    @cached_property
    def _images(self) -> Out:
        return self._whole("image", self.local.share.image)

    @cached_property
    def _texts(self) -> Out:
        text = self.local.share.text
        return self._whole("text", None if text is None else text.flatten(0, 1))

    def _whole(self, modality: Modality, items: Tensor | None) -> Out:
        if items is None:
            raise ValueError(f"a silo without {modality}")
        with _training.parameters(self.local, self.theta):
            parts = list(_training.in_blocks(self.local.model, modality, items))
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
