"""What happens to an update besides the method: compression, and weights of stale and rare replies.

Damping h(s) of the staleness s and the weight of rarely replying silos multiply a reply's weight before weights are
normalised, so they have an effect only among the replies of one merge. In a merge of a single reply, FedAsync's mixing
rate scales the step instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.config.scenario import Scenario
from fedmq.config.sections import ModelCompression, Staleness, UpdateCompression
from fedmq.errors import InputError
from fedmq.federation.noise import UPDATES
from fedmq.wire.compression import FORMS, Compressed, Settings, encoded, sent_bytes
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import Delta, DiscriminatorDelta, Model, PartialDelta, Payload

#: Prefix of a silo's personal tensors that belong to compression; the method does not see them.
_MEMORY = "compression."
#: Compressed models by the exact one, so that a model is compressed once for all silos.
_TO_SILOS: WeakKeyDictionary[Model, Model] = WeakKeyDictionary()


def compress(
    payloads: Sequence[Payload], options: UpdateCompression, layout: Layout, state: Mapping[str, Tensor], *, idle: bool
) -> tuple[tuple[Payload, ...], dict[str, Tensor]]:
    """Compress the updates of a reply, after clipping and noise, of which compression is post-processing.

    Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what an update's encoding leaves out is kept, and added
    to the silo's next update before that is encoded.

    Args:
        payloads: the reply.
        options: the scenario's options.
        layout: layout of the whole model.
        state: the silo's personal tensors after its task before; another size of update starts anew.
        idle: the silo did not train: its update of zeros is sent as such, and what was left out stays.

    Returns:
        The payloads, whose updates have the values that the coordinator decodes, and the tensors to keep.
    """
    memory = {} if options.kind == "none" else {name: state[name] for name in state if name.startswith(_MEMORY)}
    found: list[Payload] = []
    for payload in payloads:
        if options.kind == "none" or not isinstance(payload, UPDATES):
            found.append(payload)
            continue
        place = f"{_MEMORY}{payload.KIND}"
        residual, factors = (None if idle else memory.get(f"{place}.{name}") for name in ("residual", "factors"))
        update = np.asarray(payload.buffer)
        if residual is not None and residual.numel() == update.size:
            update = update + residual.numpy()
        before = None if factors is None else factors.numpy()
        settings = Settings(options.fraction, options.rank, _shapes(payload, layout), before)
        sent = encoded(options.kind, update, settings)
        # What is not finite, as of a scripted attack, is sent as it is, and refused.
        found.append(replace(payload, buffer=sent) if isinstance(sent, Compressed) else payload)
        if isinstance(sent, Compressed) and not idle and options.kind != "bfloat16":
            memory[f"{place}.residual"] = torch.from_numpy(update - np.asarray(sent))
            if options.kind == "low_rank":
                memory[f"{place}.factors"] = torch.from_numpy(sent.parts[-1])
    return tuple(found), memory


def _shapes(payload: Payload, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors of an update; none are known of a discriminator, whose tensors are sent as they are."""
    match payload:
        case Delta():
            return tuple(entry.shape for entry in layout.entries)
        case PartialDelta(names=names):
            return tuple(layout.by_name[name].shape for name in names)
        case DiscriminatorDelta(buffer=buffer):
            return ((buffer.size,),)
    return ()


def of_method(state: Mapping[str, Tensor], options: UpdateCompression) -> Mapping[str, Tensor]:
    """A silo's personal tensors without those that :func:`compress` keeps."""
    if options.kind == "none":
        return state
    return {name: tensor for name, tensor in state.items() if not name.startswith(_MEMORY)}


def model_to_silos(payload: Payload, options: ModelCompression) -> Payload:
    """A payload as it is sent to silos: a model is compressed, once for all of them; others are as they are."""
    if options.kind == "none" or not isinstance(payload, Model):
        return payload
    if payload not in _TO_SILOS:
        _TO_SILOS[payload] = replace(payload, buffer=encoded(options.kind, np.asarray(payload.buffer), Settings()))
    return _TO_SILOS[payload]


def nominal_bytes(layout: Layout, options: UpdateCompression | ModelCompression) -> int:
    """Size of a model or of an update of all its parameters as it is sent [bytes]."""
    if options.kind not in FORMS:
        return layout.nbytes
    settings = Settings(shapes=tuple(entry.shape for entry in layout.entries))
    if isinstance(options, UpdateCompression):
        settings = replace(settings, fraction=options.fraction, rank=options.rank)
    return sent_bytes(encoded(options.kind, np.zeros(layout.size, np.float32), settings))


def check_uploads(scenario: Scenario, uploads: Sequence[frozenset[type[Payload]]], *, exact: bool) -> None:
    """Refuse clipping and compression with a method whose silos send no update, or need theirs to be ``exact``.

    Raises:
        InputError: clipping or compression does not apply to the method.
    """
    sent, label = any(set(UPDATES) & kinds for kinds in uploads), scenario.protocol.label
    if sent and not exact:
        return
    why = f"{label} needs updates that are not" if sent else f"silos of {label} send no update that could be"
    if (norm := scenario.privacy.clip_norm) is not None:
        raise InputError("privacy.clip_norm", norm, f"null: {why} clipped")
    if (kind := scenario.compression.updates.kind) != "none":
        raise InputError("compression.updates.kind", kind, f"none: {why} compressed")


def check_downloads(scenario: Scenario, tasks: Sequence[Sequence[Payload]]) -> None:
    """Refuse compression of models with a method whose tasks carry none.

    Raises:
        InputError: no task has a model.
    """
    if not any(isinstance(payload, Model) for payloads in tasks for payload in payloads):
        allowed = f"none: silos of {scenario.protocol.label} are sent no model"
        raise InputError("compression.model.kind", scenario.compression.model.kind, allowed)


def damping(function: Staleness, staleness: int) -> float:
    """The scenario's h(s) (Xie et al. 2019, section 5.2); every function is 1 for a fresh reply, s = 0."""
    match function.kind:
        case "constant":
            return 1.0
        case "polynomial":
            return float((1.0 + staleness) ** -function.exponent)
        case "hinge":
            beyond = staleness - function.grace
            return 1.0 if beyond <= 0 else 1.0 / (function.slope * beyond + 1.0)
        case _:
            assert_never(function.kind)


def participation_weight(replies: int, mean: float, cap: float) -> float:
    """Weight factor of a rarely replying silo: (mean + 1) / (replies + 1), limited to [1/cap, cap].

    Without rounds, a silo that is ten times slower is merged a tenth as often, and the model forgets its data. A weight
    proportional to the interval between a silo's replies compensates for this, as in FedAU (Wang and Ji, ICLR 2024).
    As there, it is capped, since one update of a silo cannot replace arbitrarily many.

    Args:
        replies: number of the silo's merged replies.
        mean: mean of that number over all eligible silos.
        cap: largest factor, at least 1; the smallest is 1/cap.
    """
    return min(cap, max(1.0 / cap, (mean + 1.0) / (replies + 1.0)))


def mixed(old: Tensor, merged: Tensor, rate: float) -> Tensor:
    """Scale a merge's step [P]: theta + a (theta' - theta), a in [0, 1] (FedAsync, Xie et al. 2019, algorithm 1)."""
    return merged if rate == 1.0 else (old.double() + rate * (merged.double() - old.double())).to(merged.dtype)


def read_only(array: npt.NDArray[Any]) -> Tensor:
    """View a received array as a tensor without copying; use it in element-wise sums only.

    Its alignment is arbitrary, and a matrix product depends on that of its operands.
    """
    return torch.from_numpy(array)


with warnings.catch_warnings():  # changes what all threads of the process filter, so it is done here, once
    warnings.simplefilter("ignore", UserWarning)
    read_only(np.frombuffer(bytes(4), np.float32))  # torch warns about read-only arrays only the first time
