"""Shorten updates of single-modality silos by the branch that they have no data for.

Nothing trains that branch, so its change is exactly zero and is not sent: the silo uploads a partial delta of the
layers it trains, and the coordinator, which knows the silo's modalities, restores the zeros. Methods that complete the
silo's items with public ones train both branches, and nothing is left out (``Traits.completes_items``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedmq.federation.protocol import SiloFacts, Traits
from fedmq.federation.updates import read_only
from fedmq.models.two_tower import BRANCHES
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import Delta, PartialDelta, Payload
from protocols.parts import aggregation


def layers_of(layout: Layout, layers: Sequence[str] | None) -> tuple[str, ...]:
    """The layers that a method's updates cover.

    Args:
        layout: layout of the whole model.
        layers: the method's shared layers; None if it shares all.
    """
    return tuple(layout.by_name) if layers is None else tuple(layers)


def updating(silo: SiloFacts, traits: Traits) -> SiloFacts:
    """The silo as the other functions here take it: with the modalities whose branches its updates cover."""
    return replace(silo, image=True, text=True) if traits.completes_items else silo


def trainable(layers: Sequence[str], silo: SiloFacts) -> tuple[str, ...]:
    """The subset of ``layers`` that a silo trains; empty if all of them are of the modality it lacks."""
    lacked = tuple(prefix for modality, prefix in BRANCHES.items() if not getattr(silo, modality))
    return tuple(name for name in layers if not name.startswith(lacked))


def shortened(payload: Payload, layout: Layout, silo: SiloFacts) -> Payload:
    """Reduce an update to the layers that the silo trains; other payloads are returned unchanged.

    Args:
        payload: payload from the method; an update's buffer is float32.
        layout: layout of the whole model.
        silo: the sender.
    """
    if not isinstance(payload, Delta | PartialDelta):
        return payload
    layers = layers_of(layout, payload.names if isinstance(payload, PartialDelta) else None)
    kept = trainable(layers, silo)
    if kept == layers:
        return payload
    part = layout.part(layers) if isinstance(payload, PartialDelta) else layout
    change = aggregation.extract(read_only(payload.buffer), part, kept)
    return PartialDelta(payload.layout_digest, kept, change.numpy(), payload.n_samples)


def completed(payload: Payload, layout: Layout, layers: Sequence[str] | None, silo: SiloFacts) -> Payload:
    """Inverse of :func:`shortened`, at the coordinator: restore the method's update with zeros for the missing branch.

    Args:
        payload: payload as received, checked by ``coordinator.updates``.
        layout: layout of the whole model.
        layers: the layers that the method's updates cover; None for the whole model.
        silo: the sender.
    """
    if not isinstance(payload, PartialDelta):
        return payload
    names = layers_of(layout, layers)
    if trainable(names, silo) == names:
        return payload
    part = layout if layers is None else layout.part(names)
    change = torch.empty(part.size)
    for lacking in part.ranges(set(names).difference(payload.names)):
        change[lacking] = 0.0
    aggregation.insert(change, part, payload.names, read_only(payload.buffer))
    buffer = change.numpy()
    if layers is None:
        return Delta(payload.layout_digest, buffer, payload.n_samples)
    return PartialDelta(payload.layout_digest, names, buffer, payload.n_samples)
