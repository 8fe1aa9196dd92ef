"""What becomes of a silo's reply: it is validated once, into an :class:`Update`, weighted, and merged.

Pure computation; the loop does all waiting, sending and writing. A refused reply is counted and logged by
:mod:`coordinator.peers`; :mod:`coordinator.counters` counts those of each silo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from coordinator.round_events import PendingTask
from coordinator.run_context import RunContext
from fedmq.data.labels import fine_columns
from fedmq.errors import RemoteWireError, RunError
from fedmq.federation.faults import FailureReason
from fedmq.federation.noise import UPDATES
from fedmq.federation.protocol import Context, MergeResult, SiloFacts, State, Update
from fedmq.federation.updates import damping, mixed, participation_weight, read_only
from fedmq.profiling import span
from fedmq.runs.captured_payloads import capture
from fedmq.runs.run_records import MergeLine
from fedmq.text import printable
from fedmq.wire.compression import form_of
from fedmq.wire.fields import all_finite
from fedmq.wire.messages import Message
from fedmq.wire.payloads import (
    ClassPrototypes,
    Delta,
    DiscriminatorDelta,
    Error,
    LabelCount,
    Loss,
    Memory,
    Metrics,
    ModalityPrototypes,
    PartialDelta,
    Payload,
    Refusal,
    UpdateReport,
)
from protocols.parts.aggregation import completed, layers_of, trainable, updating
from protocols.parts.robust import robust_replies

#: Maximum change of a parameter. Training never produces it; merging a few larger ones would overflow the model.
LARGEST = 1e15
#: Maximum norm of an update, relative to max(1, norm of its base model). Sound training moves a model by a small part
#: of its norm; merging one larger update leaves a model that honest silos can no longer train.
LONGEST = 1e4
#: Maximum loss per sample of a silo: losses are means, but some terms are not divided by the batch size.
LARGEST_LOSS = 1e6
#: The usual cause of an implausibly large value, for the messages of refusals.
_CAUSE = "; if training diverged, lower training.learning_rate"


class ImplausibleError(RemoteWireError):
    """A reply has values so large that training has diverged, unless the silo lies."""


@span("check")
def validated(
    message: Message,
    run_context: RunContext,
    silo: SiloFacts,
    pending_task: PendingTask | None,
    base: State | None = None,
) -> Update:
    """The update in a silo's reply, checked once against its task, the run and the method.

    Args:
        message: the reply.
        run_context: fixed facts of the run.
        silo: the sender, with the modalities it had when the task was sent.
        pending_task: the silo's pending task; None if there is none.
        base: the state that the reply is based on; None if it is not kept.

    Raises:
        RemoteWireError: ``unexpected`` for another base version than the task's, which would fake a lower staleness,
            and for an update with another compression than the scenario's; also as raised by :func:`check_reply` and
            by the method's own check.
    """
    header = message.header
    if pending_task and pending_task.sequence == header.reply_to and pending_task.base_version != header.base_version:
        detail = f"base version {header.base_version}, the task had {pending_task.base_version}"
        raise RemoteWireError("unexpected", detail)
    uploads, samples = run_context.protocol.uploads(silo), run_context.samples[silo.index]
    if run_context.scenario.privacy.secure_aggregation is not None:
        uploads = uploads - run_context.protocol.sum_layout().kinds | {UpdateReport}
    traits, context, theta = run_context.traits, run_context.context, None if base is None else base.theta
    layers, twice = traits.shared_layers, silo.paired and traits.counts_items_twice
    sender, counted = updating(silo, traits), 2 if twice else 1
    check_reply(message, uploads, context, sender, layers, samples=samples, theta=theta, counted=counted)
    run_context.protocol.check(message.payloads)
    form = run_context.scenario.compression.updates.kind
    for payload in message.payloads:
        # Without a value there is nothing to compress.
        if isinstance(payload, UPDATES) and payload.buffer.size and form_of(payload.buffer) != form:
            found = form_of(payload.buffer)
            raise RemoteWireError("unexpected", f"a {payload.KIND} with compression {found}, agreed: {form}")
    assert header.reply_to is not None  # noqa: S101 - the loop refuses a reply without a task
    return Update(silo, header.reply_to, header.base_version, 0, 1.0, message.payloads)


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
    """Check a reply against the payloads that the method expects of the silo and against the run's layout.

    Decoding has checked the shapes within each payload; this function compares them with the run's.

    Args:
        message: the reply; the update of a silo that lacks a modality has no parameters of that branch.
        uploads: payload kinds that the method expects.
        context: facts shared by the method's coordinator and silo sides.
        silo: the sender, with the modalities whose branches its updates cover.
        layers: layers that the method's updates cover; None for the whole model.
        samples: training samples of the silo; None if unknown.
        theta: parameters [P] that the reply is based on; None if not kept.
        counted: maximum number of times that a row of class prototypes or of a memory counts a sample.

    Raises:
        RemoteWireError: ``unexpected`` for missing, repeated or unexpected kinds; ``layout`` for buffers of another
            layout or size; ``not_finite`` for a change above ``LARGEST``; ``malformed`` for updates without samples
            or with too large a norm, for too large a loss, and for more samples or categories than the silo can have.
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
        elif isinstance(payload, UpdateReport):
            _check_samples(payload, samples)
            if samples is not None:
                _check_weights(payload, samples, counted)
        elif isinstance(payload, DiscriminatorDelta):
            _check_change(payload, samples)
            _check_length(payload, theta)
        else:
            _check_statistics(payload, context)
            if samples is not None:
                _check_weights(payload, samples, counted)


def _check_update(payload: Delta | PartialDelta, context: Context, sent: tuple[str, ...], samples: int | None) -> None:
    """Check an update's samples and values, and its layout or the part of it that the silo sends."""
    _check_change(payload, samples)
    layout = context.layout
    if payload.layout_digest != layout.digest:
        raise RemoteWireError("layout", f"a {payload.KIND} of another layout")
    if isinstance(payload, PartialDelta) and payload.names != sent:
        raise RemoteWireError("layout", "a partial delta of other layers than the silo shares and trains")
    size = layout.size if isinstance(payload, Delta) else layout.part(sent).size if sent else 0
    if payload.buffer.size != size:
        raise RemoteWireError("layout", f"a {payload.KIND} of {payload.buffer.size} numbers, expected {size}")


def _check_samples(payload: Delta | PartialDelta | DiscriminatorDelta | UpdateReport, samples: int | None) -> None:
    """Check an update's number of samples."""
    if payload.n_samples < 1:
        raise RemoteWireError("malformed", f"a {payload.KIND} of no samples")
    if samples is not None and payload.n_samples > samples:
        # Merges weight by this number: with a false one a silo could dominate the model.
        raise RemoteWireError("malformed", f"a {payload.KIND} of {payload.n_samples} samples, the silo has {samples}")


def _check_change(payload: Delta | PartialDelta | DiscriminatorDelta, samples: int | None) -> None:
    """Check any change of parameters: number of samples and largest value."""
    _check_samples(payload, samples)
    if payload.largest > LARGEST:
        raise ImplausibleError("not_finite", f"a {payload.KIND} with a change above {LARGEST:.0e}{_CAUSE}")


def _check_length(payload: Delta | PartialDelta | DiscriminatorDelta, theta: Tensor | None) -> None:
    """Check the norm of a change against the norm of its base model."""
    # No norm is above this product, so those of updates of sound training are not computed.
    if theta is None or payload.largest * math.sqrt(payload.buffer.size) <= LONGEST:
        return
    # A single-precision norm may overflow to infinity, which is refused below.
    length = float(torch.linalg.vector_norm(read_only(payload.buffer)))
    most = LONGEST * max(1.0, float(torch.linalg.vector_norm(theta)))
    if length > most:
        raise ImplausibleError(
            "malformed", f"a {payload.KIND} of length {length:.4g}, allowed: at most {most:.4g}{_CAUSE}"
        )


def _check_weights(payload: Payload, samples: int, counted: int) -> None:
    """Check losses and sample counts, which merges weight by or sum, against the silo's number of samples."""
    match payload:
        case Loss(value=value):
            if abs(value) > (most := LARGEST_LOSS * samples):
                raise ImplausibleError("malformed", f"a loss of {value:.4g}, allowed: at most {most:.4g}{_CAUSE}")
        case ClassPrototypes(counts=counts) | Memory(support=counts) | UpdateReport(support=counts):
            if (found := int(counts.max(initial=0))) > (most := counted * samples):
                raise RemoteWireError(
                    "malformed", f"a row of {payload.KIND} of {found} samples, allowed: at most {most}"
                )
        case _:
            pass


def _check_statistics(payload: Payload, context: Context) -> None:
    """Check the shapes of payloads other than updates, as far as they are the same for all methods."""
    match payload:
        case LabelCount(value=value):
            if value > (most := len(fine_columns(context.label_names))):
                raise RemoteWireError("malformed", f"{value} categories present, the data set has {most}")
        case Metrics():
            raise RemoteWireError("unexpected", "metrics that were not requested")
        case ModalityPrototypes(image=image, text=text):
            if image.size != context.dim or text.size != context.dim:
                raise RemoteWireError(
                    "layout", f"prototypes of dimensions {image.size} and {text.size}, expected {context.dim}"
                )
        case _:
            pass


def text_of(message: Message) -> str:
    """A peer's error text for logs and terminals: one line without control characters."""
    payload = message.payloads[0]
    if isinstance(payload, Refusal):
        return f"its policy forbids {payload.withheld} ({payload.rule})"
    return printable(payload.text) if isinstance(payload, Error) else ""


def reason_of(message: Message) -> FailureReason:
    """Why the task fails that a peer answers with this error or refusal."""
    return FailureReason.POLICY if isinstance(message.payloads[0], Refusal) else FailureReason.ERROR


def weighted(
    run_context: RunContext, update: Update, states: Mapping[int, State], version: int, merged: Mapping[str, int]
) -> Update:
    """A validated update with its weights in a merge into ``version``, and the branches that its silo lacks."""
    age, context = version - update.base_version, run_context.context
    aggregation, eligible, weight = run_context.scenario.aggregation, run_context.plan.eligible, 1.0
    if aggregation.mode != "sync" and aggregation.balance is not None:
        mean = sum(merged[name] for name in eligible) / len(eligible)
        weight = participation_weight(merged[update.silo.name], mean, aggregation.balance)
    layers, sender = run_context.traits.shared_layers, updating(update.silo, run_context.traits)
    return replace(
        update,
        staleness=age,
        damping=damping(aggregation.staleness, age),
        payloads=tuple(completed(payload, context.layout, layers, sender) for payload in update.payloads),
        participation_weight=weight,
        modality_weight=_modality_weight(update, aggregation.single_weight, run_context.traits.unpaired),
        base=states[update.base_version],
    )


def _modality_weight(update: Update, weight: float, unpaired: Literal["ignored", "anchored"]) -> float:
    """Weight factor of a reply: ``weight`` for trained items that lack a modality, 1 for pairs, averaged over both."""
    if not update.silo.paired:
        return weight
    alone = min(update.silo.unpaired, update.samples) if unpaired == "anchored" else 0
    return 1.0 - (1.0 - weight) * alone / update.samples if alone else 1.0


def merged_state(
    run_context: RunContext,
    state: State,
    replies: Sequence[Update],
    round_: int,
    merge: Callable[[State, Sequence[Update], int], MergeResult] | None = None,
) -> tuple[MergeResult, tuple[str, ...]]:
    """Aggregate replies into the method's next state; ``merge`` is that of a secure sum, None the method's own.

    Returns:
        The new state with the method's log values, and the silos excluded by the scenario's robust rule. If the rule
        left modules as they are because too few silos trained them, ``robust_left`` in the log is their number.

    Raises:
        RunError: the merged model is not finite.
    """
    if run_context.scenario.privacy.capture:
        capture(run_context.folder, state, replies, round_)
    unprotected: list[str] = []
    aggregation, kept = run_context.scenario.aggregation, replies
    if aggregation.robust.rule != "none":
        kept = robust_replies(replies, aggregation.robust, run_context.context.layout, unprotected.append)
    left_out = tuple(sorted({reply.silo.name for reply in replies} - {reply.silo.name for reply in kept}))
    merged = (merge or run_context.protocol.merge)(state, kept, round_)
    # In async mode a merge has one reply, so its damping factor cannot act as a relative weight; it scales the step.
    rate = aggregation.rate * (replies[0].factor if aggregation.mode == "async" else 1.0)
    rate = min(rate, 1.0)
    after = replace(merged.state, theta=mixed(state.theta, merged.state.theta, rate))
    if rate < 1.0:
        after = run_context.protocol.mix_state(state, after, rate)
    if not all(all_finite(each.numpy()) for each in (after.theta, *after.tensors.values())):
        raise RunError(f"round {round_}: the merged model is no longer finite; lower training.learning_rate")
    log = {**merged.log, "robust_left": float(len(unprotected))} if unprotected else merged.log
    return MergeResult(after, log), left_out


def merge_line(version: int, now: float, replies: Sequence[Update], log: Mapping[str, float]) -> MergeLine:
    """The line of ``metrics.jsonl`` that records a merge."""
    losses = {reply.silo.name: reply.loss for reply in replies if reply.loss is not None}
    trained = [loss for loss in losses.values() if loss]
    line = MergeLine(
        kind="merge",
        version=version,
        now=now,
        replies=[reply.silo.name for reply in replies],
        staleness=[reply.staleness for reply in replies],
        loss=sum(trained) / len(trained) if trained else 0.0 if losses else None,
        losses=losses,
    )
    # JSON has no NaN, e.g. of a loss that overflowed.
    return line.model_copy(update={name: value if math.isfinite(value) else None for name, value in log.items()})


def states_in_use(
    states: Mapping[int, State], needed: Set[int], pending: Mapping[str, PendingTask]
) -> dict[int, State]:
    """The states that are still needed: those of given versions, and those that pending tasks are based on."""
    kept = {*needed, *(task.base_version for task in pending.values())}
    return {version: state for version, state in states.items() if version in kept}
