"""Modality prototypes: silos' mean embeddings per modality, and the coordinator's average of them.

RCSR and FedAvg with anchored single-modality silos use them. The order of modalities is image, text throughout. The
coordinator ignores prototypes of modalities that the sender lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import Modality
from fedmq.federation.protocol import Added, Context, Local, MergeResult, SiloFacts, Task, Update, WeightedSum, take
from fedmq.federation.sums import SumLayout, SummedRows
from fedmq.wire.payloads import IMAGE, TEXT, ModalityPrototypes, Payload
from protocols.parts import training
from protocols.parts.aggregation import as_tensor, branch_weights, decay_at_merge, means_of, supports
from protocols.parts.losses import local_prototype, unit

PROTOTYPES = "prototypes"
VALID = "prototypes_valid"
#: Accepted deviation of a unit vector's length from 1, from float32 sums and float16 on the wire.
TOLERANCE = 1e-3
#: Maximum samples for a silo's prototypes (RCSR's released code).
PROTOTYPE_SAMPLES = 128


def lengths(rows: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Euclidean lengths float64 [n] of received rows float16 or float32 [n, d], which may hold any values.

    In float64, squares of float32 values neither overflow nor underflow.
    """
    result: np.ndarray[Any, np.dtype[np.float64]] = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
    return result


def mask_bits(image: bool, text: bool) -> int:
    """The wire's bit mask of two flags."""
    return IMAGE * image | TEXT * text


def initial(dim: int) -> dict[str, Tensor]:
    """State tensors before the first merge: ``prototypes`` float32 [2, d] zero, ``prototypes_valid`` bool [2] false."""
    return {PROTOTYPES: torch.zeros(2, dim), VALID: torch.zeros(2, dtype=torch.bool)}


def download(tensors: Mapping[str, Tensor]) -> ModalityPrototypes:
    """Download payload of the global prototypes; its mask marks the valid ones."""
    image, text = tensors[VALID].tolist()
    rows = tensors[PROTOTYPES].numpy()
    return ModalityPrototypes(image=rows[0].copy(), text=rows[1].copy(), mask=mask_bits(image, text))


def read_download(payload: ModalityPrototypes) -> tuple[Tensor | None, Tensor | None]:
    """Read the global prototypes [d] of image and text at a silo; None for one that is not valid yet."""
    image = as_tensor(payload.image) if payload.mask & IMAGE else None
    text = as_tensor(payload.text) if payload.mask & TEXT else None
    return image, text


def silo_prototypes(local: Local, context: Context, task: Task) -> tuple[Tensor | None, Tensor | None]:
    """Image and text prototype [d] of the silo under its current model (RCSR eq 6).

    Unit-length mean over at most 128 random local samples, with one caption each; None for a missing modality. A
    modality's samples include those of the silo's items that have only this modality.
    """
    generator = training.generator_of(context, local, task, "prototypes")
    if local.unpaired:
        return _prototype(local, "image", generator), _prototype(local, "text", generator)
    rows = np.sort(generator.permutation(len(local.dataset))[:PROTOTYPE_SAMPLES])
    caption = training.choose_captions(local, generator)
    with torch.no_grad():
        image, text = training.embed(local, rows, caption)
        return (
            None if image is None else local_prototype(image).cpu(),
            None if text is None else local_prototype(text).cpu(),
        )


def _prototype(local: Local, modality: Modality, generator: np.random.Generator) -> Tensor:
    """Prototype [d] of one modality of a silo that also holds items without a pair."""
    parts = [part for part in (local.dataset, *local.unpaired) if getattr(part, modality) is not None]
    edges = np.cumsum([0, *map(len, parts)])
    chosen = np.sort(generator.permutation(int(edges[-1]))[:PROTOTYPE_SAMPLES])
    embedded = []
    with torch.no_grad():
        for part, start, end in zip(parts, edges[:-1], edges[1:], strict=True):
            rows, some = chosen[(chosen >= start) & (chosen < end)] - start, replace(local, dataset=part)
            image, text = training.outputs(some, rows, training.choose_captions(some, generator), (modality,))
            embedded += [out.code for out in (image, text) if out is not None]
        return local_prototype(torch.cat(embedded)).cpu()


def upload(
    local: tuple[Tensor | None, Tensor | None], filler: tuple[Tensor | None, Tensor | None]
) -> ModalityPrototypes:
    """Upload payload of the silo's prototypes [d] (RCSR eq 6); a missing modality has the filler [d], or zeros."""
    dim = next(prototype for prototype in local if prototype is not None).shape[0]
    rows: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
    for prototype, substitute in zip(local, filler, strict=True):
        chosen = prototype if prototype is not None else substitute
        rows.append(np.zeros(dim, np.float32) if chosen is None else chosen.detach().cpu().float().numpy())
    return ModalityPrototypes(image=rows[0], text=rows[1], mask=mask_bits(local[0] is not None, local[1] is not None))


def has(silo: SiloFacts) -> tuple[bool, bool]:
    """Whether a silo has images and texts."""
    return silo.image, silo.text


def read_uploads(replies: Sequence[Update], dim: int) -> tuple[Tensor, Tensor]:
    """All replies' prototypes: float32 [M, 2, d], zero where filled, and mask bool [M, 2].

    A prototype is used if the silo marks it as real and has the modality according to the roster. Prototypes have unit
    length (RCSR eq 6); others are normalised, so that no silo gains weight by a long vector. If a secure sum adds
    prototypes, no reply has any: its rows are zero, and the mask says which modalities its silo has.
    """
    rows, mask = torch.zeros(len(replies), 2, dim), torch.zeros(len(replies), 2, dtype=torch.bool)
    for index, reply in enumerate(replies):
        if reply.report is not None and not any(isinstance(each, ModalityPrototypes) for each in reply.payloads):
            mask[index] = torch.tensor(has(reply.silo))
            continue
        payload = take(reply.payloads, ModalityPrototypes)
        sent = (payload.mask & IMAGE, payload.mask & TEXT)
        values = (payload.image, payload.text)
        for modality, owned in enumerate(has(reply.silo)):
            if owned and sent[modality]:
                rows[index, modality] = _of_unit_length(as_tensor(values[modality]))
                mask[index, modality] = True
    return rows, mask


def _of_unit_length(row: Tensor) -> Tensor:
    """Normalise a prototype float32 [d]; unit vectors are returned unchanged, since dividing would round them again."""
    row_f64 = row.double()
    near = abs(float(torch.linalg.vector_norm(row_f64)) - 1) <= TOLERANCE
    return row if near else unit(row_f64).float()


def moving_average(old: Tensor, local: Tensor, weights: Tensor, rate: float, mask: Tensor | None = None) -> Tensor:
    """Moving average mu * old + (1 - mu) * sum_k w_k p_k (RCSR, below eq 11).

    Args:
        old: [d] global prototype of one modality.
        local: [M, d] the replying silos' prototypes.
        weights: [M], sum 1.
        rate: mu.
        mask: 0/1 [M], real prototypes: only these are averaged, with renormalised weights; ``old`` is returned if there
            are none. None averages all of them, fillers included, as printed in the paper.

    Returns:
        [d], not normalised.
    """
    if mask is None:
        return rate * old + (1 - rate) * (weights @ local)
    kept = weights * mask
    total = kept.sum()
    if float(total) == 0.0:
        return old.clone()
    return rate * old + (1 - rate) * ((kept / total) @ local)


def updated(
    tensors: Mapping[str, Tensor],
    local: Tensor,
    mask: Tensor,
    weights: Tensor,
    rate: float,
    *,
    unit_length: bool = True,
    masked: bool = True,
) -> dict[str, Tensor]:
    """The global prototypes after a merge: the first observation is used directly, later ones enter the moving average.

    Args:
        tensors: with ``prototypes`` and ``prototypes_valid``.
        local: [M, 2, d]; rows that are not real hold the filler.
        mask: bool [M, 2], which rows are real.
        weights: float64 [M].
        rate: mu.
        unit_length: renormalise, so that fillers are as long as real prototypes.
        masked: leave fillers out, see :func:`moving_average`.

    Returns:
        New versions of the two tensors.
    """
    prototypes, valid = tensors[PROTOTYPES].clone(), tensors[VALID].clone()
    for modality in (0, 1):
        real = mask[:, modality]
        if float((weights * real).sum()) == 0.0:  # no replying silo of non-zero weight has the modality
            continue
        first = not bool(valid[modality])
        chosen = real.double() if masked or first else None
        new = moving_average(
            prototypes[modality].double(), local[:, modality].double(), weights, 0.0 if first else rate, chosen
        )
        prototypes[modality] = (unit(new) if unit_length else new).float()
        valid[modality] = True
    return {PROTOTYPES: prototypes, VALID: valid}


# ------------------------------------------------------------------------------------------------------- secure sums
def summed(dim: int) -> Mapping[type[Payload], SummedRows]:
    """The prototypes [2, d] of replies in a secure sum, of unit length."""
    return {ModalityPrototypes: SummedRows(2, dim, 1 + TOLERANCE, common=True)}


def with_sum(
    weighted: WeightedSum,
    before: Mapping[str, Tensor],
    replies: Sequence[Update],
    layout: SumLayout,
    *,
    ema: float,
    cohort: int | None,
    unit_length: bool,
) -> WeightedSum:
    """A secure sum of updates that also adds the silos' prototypes, if the layout has them, with the same weights.

    Replies have reports; ``before`` are the tensors before the merge. For ``ema`` and ``cohort`` see
    :func:`protocols.parts.aggregation.decay_at_merge`, for ``unit_length`` :func:`updated`.
    """
    if ModalityPrototypes not in layout.rows:
        return weighted
    held = supports(replies, layout, ModalityPrototypes) > 0
    held &= torch.tensor([has(reply.silo) for reply in replies])
    rows = {
        name: branch_weights(weighted.weights, of_modality)
        for name, of_modality in zip(layout.row_names(ModalityPrototypes), held.T, strict=True)
    }

    def finish(added: Added) -> MergeResult:
        merged, (means, known) = weighted.finish(added), means_of(added.means, layout, ModalityPrototypes)
        one, rate = torch.ones(1, dtype=torch.float64), decay_at_merge(ema, len(added.replies), cohort)
        new = updated(before, means[None].float(), known[None], one, rate, unit_length=unit_length)
        return replace(merged, state=replace(merged.state, tensors={**merged.state.tensors, **new}))

    return replace(weighted, rows={**weighted.rows, **rows}, finish=finish)
