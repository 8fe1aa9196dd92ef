"""Validation of replies before the rounds machine receives them, and why a task has no usable reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from coordinator.counters import Counters
from coordinator.rounds import PendingTask
from coordinator.run_context import RunContext
from fedmq.data.labels import fine_columns
from fedmq.errors import DivergedError, RemoteWireError, RunError
from fedmq.federation.faults import FailureReason
from fedmq.federation.protocol import Context, SiloFacts, State, Update
from fedmq.federation.updates import read_only
from fedmq.runs.run_records import UnusableReplies
from fedmq.runs.status import ERROR_CHARACTERS
from fedmq.text import printable
from fedmq.wire.messages import Message
from fedmq.wire.payloads import (
    DIVERGED,
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
)
from protocols.parts.missing_branch import layers_of, trainable

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
        RemoteWireError: ``unexpected`` for another base version than the task's, which would fake a lower staleness;
            also as raised by :func:`check_reply` and by the method's own check.
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
        silo: the sender.
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


def _check_change(payload: Delta | PartialDelta | DiscriminatorDelta, samples: int | None) -> None:
    """Check any change of parameters: number of samples, data type and largest value."""
    if payload.n_samples < 1:
        raise RemoteWireError("malformed", f"a {payload.KIND} of no samples")
    if samples is not None and payload.n_samples > samples:
        # Merges weight by this number: with a false one a silo could dominate the model.
        raise RemoteWireError("malformed", f"a {payload.KIND} of {payload.n_samples} samples, the silo has {samples}")
    if payload.buffer.dtype != "float32":
        raise RemoteWireError("layout", f"a {payload.KIND} of {payload.buffer.dtype}, expected float32")
    low, high = torch.aminmax(read_only(payload.buffer)) if payload.buffer.size else (0.0, 0.0)
    if max(-float(low), float(high)) > LARGEST:
        raise ImplausibleError("not_finite", f"a {payload.KIND} with a change above {LARGEST:.0e}{_CAUSE}")


def _check_length(payload: Delta | PartialDelta | DiscriminatorDelta, theta: Tensor | None) -> None:
    """Check the norm of a change against the norm of its base model."""
    if theta is None:
        return
    # A single-precision norm may overflow to infinity, which is refused below. The norm of the base model is computed
    # only for long changes.
    length = float(torch.linalg.vector_norm(read_only(payload.buffer)))
    if length <= LONGEST:
        return
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
        case ClassPrototypes(counts=counts) | Memory(support=counts):
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


def says_diverged(message: Message) -> bool:
    """Whether a silo reports that its training diverged."""
    payload = message.payloads[0]
    return isinstance(payload, Error) and payload.code == DIVERGED


def reason_of(message: Message) -> FailureReason:
    """Why the task fails that a peer answers with this error or refusal."""
    return FailureReason.POLICY if isinstance(message.payloads[0], Refusal) else FailureReason.ERROR


class TaskErrors:
    """Task errors since the last merge that had a reply, at most one per silo to bound memory.

    Args:
        errors: by silo; updated in place. Checkpoints store it, so that a resumed run in which no silo could train
            still ends with an error.
        unusable: replies that could not be merged in the whole run, by silo; updated in place.
    """

    def __init__(self, errors: dict[str, str], unusable: dict[str, UnusableReplies]) -> None:
        self._pending: dict[str, tuple[str, str, bool]] = {}
        self._errors, self._unusable = errors, unusable

    def reported(self, silo: str, text: str, *, diverged: bool = False) -> None:
        """A silo reported an error of its pending task; it is recorded when the failure is due on the timeline."""
        self._pending[silo] = "errors", text, diverged

    def refused(self, silo: str, why: RemoteWireError | str, *, scripted: bool) -> None:
        """The reply to a silo's pending task was refused; recorded like an error unless the scenario scripts it."""
        text, diverged = f"its reply was refused: {printable(str(why))}", isinstance(why, ImplausibleError)
        self._pending[silo] = ("scripted", text, False) if scripted else ("refused", text, diverged)

    def task_failed(self, silo: str) -> None:
        """The failure of a silo's task is due: record its error or refusal, if that is why it failed."""
        if silo not in self._pending:
            return
        kind, text, diverged = self._pending.pop(silo)
        if kind != "scripted":
            self._errors[silo] = text
        before = self._unusable.get(silo) or UnusableReplies(refused=0, scripted=0, errors=0, diverged=0, last="")
        changes = {
            kind: getattr(before, kind) + 1,
            "diverged": before.diverged + diverged,
            "last": text[:ERROR_CHARACTERS],
        }
        self._unusable[silo] = before.model_copy(update=changes)

    def silo_failed(self, silo: str, text: str) -> None:
        """A silo reported that it cannot continue."""
        self._errors[silo] = text

    def clear(self) -> None:
        """Forget all errors: a merge had a reply."""
        self._errors.clear()

    @property
    def first(self) -> str | None:
        """The first error, if there is one."""
        return next((f"{name}: {text}" for name, text in self._errors.items()), None)

    def of_all(self, silos: Iterable[str]) -> str | None:
        """The first error, if every one of these silos had one."""
        return self.first if set(silos) <= set(self._errors) else None

    def failure(self, why: str) -> RunError:
        """The error that ends the run: a DivergedError if training diverged in all tasks of the silos with errors."""
        found = [self._unusable.get(silo, UnusableReplies(errors=1)) for silo in self._errors]
        diverged = found and all(each.diverged == each.refused + each.errors for each in found)
        return DivergedError(why) if diverged else RunError(why)


def nothing_merged(errors: TaskErrors, counters: Counters, rounds: int) -> RunError:
    """The error of a run without a merged reply.

    Args:
        errors: errors of the run.
        counters: counters of the run.
        rounds: number of its rounds.
    """
    if (error := errors.first) is not None:
        return errors.failure(f"no silo could train in any round; the first error was {error}")
    lost = {**counters.failures, **counters.discarded}
    why = ", ".join(f"{reason} {count}" for reason, count in sorted(lost.items())) or "no task was sent"
    return RunError(f"no silo trained: no reply was merged in any of the {rounds} rounds ({why})")
