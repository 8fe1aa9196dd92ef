"""What a secure sum adds: the sections of a reply, and their noise.

A section has weights of its own: a branch of the update, a further change of parameters, or a row such as a class
prototype. :mod:`fedmq.wire.secure_sum` has the sums themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fedmq.config.privacy import Privacy
from fedmq.federation.noise import CLIP_BIT, noise_of
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import F32, F64, I64, IMAGE, TEXT, Delta, ModalityPrototypes, PartialDelta, Payload, tensors
from fedmq.wire.secure_sum import STEPS

#: Standard deviations of noise that the bound of a sum has room for; fewer than one in 10^15 sums of 10^7 numbers needs
#: more.
_ROOM = 10.0
#: Smallest standard deviation of a share of the noise [steps]: a rounded Gaussian is then close to a discrete one, see
#: docs/explanation/secure_sums.md.
_LEAST_STEPS = 64


@dataclass(frozen=True)
class SummedRows:
    """Rows of a payload, such as class prototypes, that a secure sum adds; each row is a sum of its own."""

    count: int  # number of rows
    width: int  # numbers in a row
    largest: float  # bound of their magnitude
    # Nearly all silos hold them: if a silo drops out, its share of their sums is removed, as in branches.
    common: bool = False


@dataclass(frozen=True)
class SumLayout:
    """The parts of a reply that a secure sum adds: branches of the update, further changes of parameters, and rows."""

    layout: Layout  # of the whole model
    layers: tuple[str, ...] | None  # layers of the update; None for the whole model
    branches: Mapping[str, slice]  # ranges of the update [P]; together they cover it
    # Number of parameters of further changes, by their payload, whose first tensor is the change.
    changes: Mapping[type[Payload], int] = field(default_factory=dict)
    rows: Mapping[type[Payload], SummedRows] = field(default_factory=dict)  # by their payload; common ones come first
    bit: bool = False  # whether silos add the bit of adaptive clipping
    # Largest ratio of two silos' own factors, by which they multiply what they add to a section; 1 for other sections.
    factors: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Number of values of each section, by name."""
        found = {name: part.stop - part.start for name, part in self.branches.items()}
        found |= {kind.KIND: size for kind, size in self.changes.items()} | ({CLIP_BIT: 1} if self.bit else {})
        for kind, rows in self.rows.items():
            found |= dict.fromkeys(self.row_names(kind), rows.width)
        return found

    @property
    def first_row(self) -> int:
        """Number of sections before the first row that is not common."""
        return self.first_held + sum(rows.count for rows in self.rows.values() if rows.common)

    @property
    def first_held(self) -> int:
        """Number of sections before the first row."""
        return len(self.branches) + len(self.changes) + self.bit

    @property
    def kinds(self) -> frozenset[type[Payload]]:
        """Payloads of a reply that never leave a silo."""
        return frozenset({Delta, PartialDelta, *self.changes, *self.rows})

    @cached_property
    def ratios(self) -> tuple[float, ...]:
        """Largest ratio of two silos' own factors in each section."""
        return tuple(self.factors.get(name, 1.0) for name in self.sizes)

    def row_names(self, kind: type[Payload]) -> list[str]:
        """Names of the rows of a payload."""
        return [f"{kind.KIND}.{row}" for row in range(self.rows[kind].count)]

    @cached_property
    def section_kinds(self) -> tuple[str, ...]:
        """The kind of payload that each section is a part of."""
        changes = (*(Delta.KIND for _ in self.branches), *(kind.KIND for kind in self.changes))
        rows = (kind.KIND for kind, rows in self.rows.items() for _ in range(rows.count))
        return (*changes, *([CLIP_BIT] if self.bit else ()), *rows)

    def bounds(self, largest: float) -> tuple[float, ...]:
        """Bound of the values in each section without noise; ``largest`` for changes of parameters."""
        changes = (len(self.branches) + len(self.changes)) * (largest,)
        rows = (rows.largest for rows in self.rows.values() for _ in range(rows.count))
        return (*changes, *([0.5] if self.bit else ()), *rows)


def with_bit(layout: SumLayout, privacy: Privacy) -> SumLayout:
    """What a method's secure sum adds, with the bit of adaptive clipping if the scenario has it."""
    return layout if privacy.adaptive_clip is None else replace(layout, bit=True)


def rows_of(payload: Payload) -> tuple[F32, I64]:
    """The rows [C, r] of a payload that a secure sum adds, and the number of samples behind each [C], 0 of none.

    The prototype of a modality has 1 there, however many samples its silo has.
    """
    if isinstance(payload, ModalityPrototypes):
        held = np.array([payload.mask & bit > 0 for bit in (IMAGE, TEXT)], np.int64)
        return np.stack([payload.image, payload.text]), held
    *_, rows, support = tensors(payload)
    return rows, support


@dataclass(frozen=True)
class Scales:
    """How the numbers of each section of a secure sum are sent: all silos of it derive the same."""

    bounds: tuple[float, ...]  # bound of a sum's magnitude
    shares: tuple[float, ...]  # standard deviation of the noise that each silo adds to its weighted numbers; 0 for none
    factors: tuple[float, ...]  # of the numbers, at most 1: rounding makes no payload longer than its clipping norm


def scales(layout: SumLayout, privacy: Privacy, weights: F64, least: int) -> Scales:
    """The bounds and the noise of a secure sum.

    A sum of weighted payloads of norm at most C gets noise of standard deviation z C max_k(w_k), as its sensitivity to
    one silo's payload is C max_k(w_k). Each silo adds an independent share with 1/m of the variance, rounded to the
    steps of the sum, where any sum that is opened has at least m silos of the section. This is the distributed discrete
    Gaussian mechanism (Kairouz, Liu and Steinke, ICML 2021, Theorem 1), with rounded Gaussians for discrete ones. It
    satisfies zero-concentrated differential privacy with the Gaussian's rho, because with shares of at least
    ``_LEAST_STEPS`` steps the theorem's tau is 0 in double precision.

    Args:
        layout: what the sum adds.
        privacy: the scenario's options, with the present clipping norm of updates.
        weights: float64 [C, N], of N silos in C sections.
        least: number of silos that a sum needs.
    """
    options = privacy.secure_aggregation
    assert options is not None  # noqa: S101 - only such runs have sums
    plain, kinds, sizes = layout.bounds(options.range), layout.section_kinds, tuple(layout.sizes.values())
    bounds, shares, rounding = list[float](), list[float](), dict[str, float]()
    for place, row in enumerate(weights):
        noise, largest, held = noise_of(kinds[place], privacy), float(row.max(initial=0.0)), int((row > 0).sum())
        if noise is None or not noise.noise_multiplier or not held:
            bounds.append(plain[place])
            shares.append(0.0)
            continue
        left = held
        if place < layout.first_row:  # rows are opened only with all of their silos
            left = min(held, max(held - (len(row) - least), math.ceil(options.min_contributors - 1e-9), 1))
        share = noise.noise_multiplier * noise.clip_norm * largest / math.sqrt(left)
        bounds.append(noise.clip_norm + _ROOM * share * math.sqrt(held))
        shares.append(max(share, _LEAST_STEPS * bounds[-1] / STEPS))
        square = sizes[place] * (bounds[-1] / STEPS / (2 * noise.clip_norm * largest)) ** 2
        rounding[kinds[place]] = rounding.get(kinds[place], 0.0) + square
    factors = (1.0 - math.sqrt(rounding[kind]) - 1e-6 if kind in rounding else 1.0 for kind in kinds)
    return Scales(tuple(bounds), tuple(shares), tuple(factors))
