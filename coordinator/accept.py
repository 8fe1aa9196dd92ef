"""What a reply must look like before the rounds machine hears of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coordinator.rounds import Flight
from coordinator.setting import Setting
from fedmq.errors import RemoteWireError
from fedmq.messages import (
    Delta,
    DiscriminatorDelta,
    Memory,
    Message,
    Metrics,
    ModalityPrototypes,
    PartialDelta,
    Payload,
)
from fedmq.protocol import Checking, Context, SiloFacts
from protocols._absent import layers_of, trainable
from protocols._merge import read_only

#: Largest change of a parameter. No training makes it; a few merges of larger ones would leave no finite model.
LARGEST = 1e15


def accept(message: Message, setting: Setting, silo: SiloFacts, flight: Flight | None) -> None:
    """Check a silo's reply against its task, the run and the method.

    Args:
        message: the reply.
        setting: of the run.
        silo: who sent it, as it was when it was asked.
        flight: the task that it is at; None if nothing is asked of it.

    Raises:
        RemoteWireError: ``unexpected`` for another base version than its task stood on, which would make a silo fresher
            than it is; what :func:`check_reply` and the method's own check raise.
    """
    header = message.header
    if flight and flight.sequence == header.reply_to and flight.base_version != header.base_version:
        detail = f"base version {header.base_version}, the task had {flight.base_version}"
        raise RemoteWireError("unexpected", detail)
    uploads, samples = setting.protocol.uploads(silo), setting.samples[silo.index]
    check_reply(message, uploads, setting.context, silo, setting.layers, samples=samples)
    if isinstance(setting.protocol, Checking):
        setting.protocol.check(message.payloads)


def check_reply(
    message: Message,
    uploads: frozenset[type[Payload]],
    context: Context,
    silo: SiloFacts,
    layers: Sequence[str] | None = None,
    *,
    samples: int | None = None,
) -> None:
    """Check a reply against what the method lets this silo upload and against the run's layout and dimension.

    Shapes inside one payload were checked in decoding; here they are compared with the run's own.

    Args:
        message: the reply, an update of a silo that lacks a modality without that branch.
        uploads: the payload kinds that the method makes.
        context: of the run.
        silo: who sent it.
        layers: that the method's updates are of; None for the whole model.
        samples: that the silo trains on, as far as the coordinator knows; None if it does not.

    Raises:
        RemoteWireError: ``unexpected`` for kinds that are missing, repeated or not asked for; ``layout`` for buffers
            of another layout or size; ``malformed`` for updates of no samples, or of more than the silo has.
    """
    shared = layers_of(context.layout, layers)
    sent = trainable(shared, silo)
    if sent != shared and Delta in uploads:
        uploads = uploads - {Delta} | {PartialDelta}
    kinds = [type(payload) for payload in message.payloads]
    if frozenset(kinds) != uploads or len(kinds) != len(uploads):
        found = ", ".join(kind.KIND for kind in kinds) or "nothing"
        wanted = ", ".join(sorted(kind.KIND for kind in uploads))
        raise RemoteWireError("unexpected", f"a reply with {found}, allowed: {wanted}")
    for payload in message.payloads:
        if isinstance(payload, Delta | PartialDelta):
            _check_update(payload, context, sent, samples)
        elif isinstance(payload, DiscriminatorDelta):
            _check_change(payload, samples)
        else:
            _check_statistics(payload, context)


def _check_update(payload: Delta | PartialDelta, context: Context, sent: tuple[str, ...], samples: int | None) -> None:
    """An update has samples behind it and fits the run's layout, or the part of it that the silo sends."""
    _check_change(payload, samples)
    layout = context.layout
    if payload.layout_digest != layout.digest:
        raise RemoteWireError("layout", f"a {payload.KIND} of another layout")
    if isinstance(payload, PartialDelta):
        if payload.names != sent:
            raise RemoteWireError("layout", "a partial delta of other layers than this silo shares and trains")
        layout = layout.part(sent)
    if payload.buffer.size != layout.size:
        raise RemoteWireError("layout", f"a {payload.KIND} of {payload.buffer.size} numbers, here {layout.size}")


def _check_change(payload: Delta | PartialDelta | DiscriminatorDelta, samples: int | None) -> None:
    """What is true of every change of parameters: samples behind it, single precision, and no number that is none."""
    if payload.n_samples < 1:
        raise RemoteWireError("malformed", f"a {payload.KIND} of no samples")
    if samples is not None and payload.n_samples > samples:
        # Merges weigh by this number: who could say any would have the whole model.
        raise RemoteWireError("malformed", f"a {payload.KIND} of {payload.n_samples} samples, the silo has {samples}")
    if payload.buffer.dtype != "float32":
        raise RemoteWireError("layout", f"a {payload.KIND} of {payload.buffer.dtype}, here float32")
    low, high = torch.aminmax(read_only(payload.buffer)) if payload.buffer.size else (0.0, 0.0)
    if max(-float(low), float(high)) > LARGEST:
        raise RemoteWireError("not_finite", f"a {payload.KIND} with a change above {LARGEST:.0e}")


def _check_statistics(payload: Payload, context: Context) -> None:
    """What travels beside an update has the run's own shapes, as far as they are the same for all methods."""
    match payload:
        case Memory(centroids=centroids):
            classifier = context.layout.by_name.get("visual.classifier.weight")
            if classifier is None or centroids.shape != classifier.shape:
                raise RemoteWireError("layout", f"a memory of shape {centroids.shape}")
        case Metrics():
            raise RemoteWireError("unexpected", "metrics nobody asked for")
        case ModalityPrototypes(image=image, text=text):
            if image.size != context.dim or text.size != context.dim:
                raise RemoteWireError("layout", f"prototypes of {image.size} and {text.size}, here {context.dim}")
        case _:
            pass
