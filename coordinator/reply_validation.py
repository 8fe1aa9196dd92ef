"""What a reply must look like before the rounds machine hears of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coordinator.rounds import PendingTask
from coordinator.run_context import RunContext
from fedmq.data.label_levels import fine_columns
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Context, SiloFacts, State
from fedmq.wire.messages import (
    ClassPrototypes,
    Delta,
    DiscriminatorDelta,
    LabelCount,
    Loss,
    Memory,
    Message,
    Metrics,
    ModalityPrototypes,
    PartialDelta,
    Payload,
)
from protocols._aggregation import read_only
from protocols._missing_branch import layers_of, trainable

#: Largest change of a parameter. No training makes it; a few merges of larger ones would leave no finite model.
LARGEST = 1e15
#: Largest length of an update, in lengths of the model that it is of, or in ones if the model is shorter. Training that
#: goes well moves a model by a small part of its length; one such update in a merge leaves a model that cannot be
#: trained any more, and that silos without fault would be the first to complain of.
LONGEST = 1e4
#: Largest loss for each sample of a silo: losses are means, but not every term of every base is divided by the batch.
LARGEST_LOSS = 1e6


def validate_reply(
    message: Message,
    run_context: RunContext,
    silo: SiloFacts,
    pending_task: PendingTask | None,
    base: State | None = None,
) -> None:
    """Check a silo's reply against its task, the run and the method.

    Args:
        message: the reply.
        run_context: of the run.
        silo: who sent it, as it was when it was asked.
        pending_task: the task that it is at; None if nothing is asked of it.
        base: the state that the reply stands on; None if that is kept no more.

    Raises:
        RemoteWireError: ``unexpected`` for another base version than its task stood on, which would make a silo fresher
            than it is; what :func:`check_reply` and the method's own check raise.
    """
    header = message.header
    if pending_task and pending_task.sequence == header.reply_to and pending_task.base_version != header.base_version:
        detail = f"base version {header.base_version}, the task had {pending_task.base_version}"
        raise RemoteWireError("unexpected", detail)
    uploads, samples = run_context.protocol.uploads(silo), run_context.samples[silo.index]
    traits, context, theta = run_context.traits, run_context.context, None if base is None else base.theta
    layers, twice = traits.shared_layers, silo.paired and traits.counts_items_twice
    check_reply(message, uploads, context, silo, layers, samples=samples, theta=theta, counted=2 if twice else 1)
    run_context.protocol.check(message.payloads)


def check_reply(
    message: Message,
    uploads: frozenset[type[Payload]],
    context: Context,
    silo: SiloFacts,
    layers: Sequence[str] | None = None,
    *,
    samples: int | None = None,
    theta: Tensor | None = None,
    counted: int = 1,
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
        theta: the model that the reply stands on, as far as the coordinator has it.
        counted: how often a row of class prototypes or of a memory counts a sample, at most.

    Raises:
        RemoteWireError: ``unexpected`` for kinds that are missing, repeated or not asked for; ``layout`` for buffers
            of another layout or size; ``malformed`` for updates of no samples or too long to be any training's, for
            losses that none makes, and for more samples or categories than the silo can have.
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
            _check_length(payload, theta)
        elif isinstance(payload, DiscriminatorDelta):
            _check_change(payload, samples)
            _check_length(payload, theta)
        else:
            _check_statistics(payload, context)
            if samples is not None:
                _check_weights(payload, samples, counted)


def _check_update(payload: Delta | PartialDelta, context: Context, sent: tuple[str, ...], samples: int | None) -> None:
    """An update has samples behind it and fits the run's layout, or the part of it that the silo sends."""
    _check_change(payload, samples)
    layout = context.layout
    if payload.layout_digest != layout.digest:
        raise RemoteWireError("layout", f"a {payload.KIND} of another layout")
    if isinstance(payload, PartialDelta) and payload.names != sent:
        raise RemoteWireError("layout", "a partial delta of other layers than this silo shares and trains")
    size = layout.size if isinstance(payload, Delta) else layout.part(sent).size if sent else 0
    if payload.buffer.size != size:
        raise RemoteWireError("layout", f"a {payload.KIND} of {payload.buffer.size} numbers, here {size}")


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


def _check_length(payload: Delta | PartialDelta | DiscriminatorDelta, theta: Tensor | None) -> None:
    """A change is not so long that a merge with it would leave nothing to train."""
    if theta is None:
        return
    # In single precision, which may well be infinite: every reply is measured so, and only long ones further.
    length = float(torch.linalg.vector_norm(read_only(payload.buffer)))
    if length <= LONGEST:
        return
    most = LONGEST * max(1.0, float(torch.linalg.vector_norm(theta)))
    if length > most:
        raise RemoteWireError("malformed", f"a {payload.KIND} of length {length:.4g}, here at most {most:.4g}")


def _check_weights(payload: Payload, samples: int, counted: int) -> None:
    """What merges weigh by, or sum up, is no more than a silo of so many samples can say."""
    match payload:
        case Loss(value=value):
            if abs(value) > (most := LARGEST_LOSS * samples):
                raise RemoteWireError("malformed", f"a loss of {value:.4g}, here at most {most:.4g}")
        case ClassPrototypes(counts=counts) | Memory(support=counts):
            if (found := int(counts.max(initial=0))) > (most := counted * samples):
                raise RemoteWireError("malformed", f"a row of {payload.KIND} of {found} samples, at most {most} here")
        case _:
            pass


def _check_statistics(payload: Payload, context: Context) -> None:
    """What travels beside an update has the run's own shapes, as far as they are the same for all methods."""
    match payload:
        case Memory(centroids=centroids):
            classifier = context.layout.by_name.get("visual.classifier.weight")
            if classifier is None or centroids.shape != classifier.shape:
                raise RemoteWireError("layout", f"a memory of shape {centroids.shape}")
        case LabelCount(value=value):
            if value > (most := len(fine_columns(context.label_names))):
                raise RemoteWireError("malformed", f"{value} categories present, here are {most}")
        case Metrics():
            raise RemoteWireError("unexpected", "metrics nobody asked for")
        case ModalityPrototypes(image=image, text=text):
            if image.size != context.dim or text.size != context.dim:
                raise RemoteWireError("layout", f"prototypes of {image.size} and {text.size}, here {context.dim}")
        case _:
            pass
