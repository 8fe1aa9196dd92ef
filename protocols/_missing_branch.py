"""What a silo that lacks a modality leaves out of its updates: the branch it has no data for.

Nothing trains that branch, so its change is exactly zero and need not travel: the update goes up as a
partial delta of the layers the silo trains, and the coordinator, which knows what it lacks, puts the zeros back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedmq.federation.protocol import SiloFacts
from fedmq.models.two_tower import BRANCHES
from fedmq.wire.layout import Layout
from fedmq.wire.messages import Delta, PartialDelta, Payload
from protocols import _aggregation


def layers_of(layout: Layout, layers: Sequence[str] | None) -> tuple[str, ...]:
    """The layers that a method's updates are of.

    Args:
        layout: of the whole model.
        layers: of a method that shares some of them; None where it shares all.
    """
    return tuple(layout.by_name) if layers is None else tuple(layers)


def trainable(layers: Sequence[str], silo: SiloFacts) -> tuple[str, ...]:
    """Those of some layers that a silo trains; none where all that a method shares is of the modality it lacks."""
    lacked = tuple(prefix for modality, prefix in BRANCHES.items() if not getattr(silo, modality))
    return tuple(name for name in layers if not name.startswith(lacked))


def shortened(payload: Payload, layout: Layout, silo: SiloFacts) -> Payload:
    """A silo's payload as it travels: of an update only the layers the silo trains; all else as it is.

    Args:
        payload: as the method made it; an update's buffer is float32.
        layout: of the whole model.
        silo: whose payload it is.
    """
    if not isinstance(payload, Delta | PartialDelta):
        return payload
    layers = layers_of(layout, payload.names if isinstance(payload, PartialDelta) else None)
    kept = trainable(layers, silo)
    if kept == layers:
        return payload
    change = _aggregation.extract(_aggregation.read_only(payload.buffer), layout.part(layers), kept)
    return PartialDelta(payload.layout_digest, kept, change.numpy(), payload.n_samples)


def completed(payload: Payload, layout: Layout, layers: Sequence[str] | None, silo: SiloFacts) -> Payload:
    """The inverse of :func:`shortened` at the coordinator: the update as the method made it, with zeros put back.

    Args:
        payload: as it came, checked by ``coordinator.reply_validation``.
        layout: of the whole model.
        layers: that the method's updates are of; None for the whole model.
        silo: whose payload it is.
    """
    names = layers_of(layout, layers)
    if not isinstance(payload, PartialDelta) or trainable(names, silo) == names:
        return payload
    part = layout.part(names)
    change = torch.zeros(part.size)
    _aggregation.insert(change, part, payload.names, _aggregation.read_only(payload.buffer))
    buffer = change.numpy()
    if layers is None:
        return Delta(payload.layout_digest, buffer, payload.n_samples)
    return PartialDelta(payload.layout_digest, names, buffer, payload.n_samples)
