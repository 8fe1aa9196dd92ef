"""Schema of a scenario's section privacy: clipping, noise and budget of what silos send, and secure aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator, model_validator

from fedmq.config.faults import AnyFault, Persistent, StepFault
from fedmq.config.sections import Aggregation, Compression, Count, Fraction, NonNegative, Number, Part, Positive
from fedmq.errors import ConflictError

#: Smallest and largest noise multiplier above 0 in a run with secure sums.
NOISE_OF_SUMS = (0.01, 256.0)


class SecureAggregation(Part):
    """Secure aggregation: the coordinator sees only sums of updates; see docs/explanation/secure_sums.md."""

    range: Positive = Field(
        1.0,
        description="largest change of a parameter in an update; a silo with a larger one refuses its task. Updates "
        "are sent in steps of range / 2^30",
    )
    max_weight: Number = Field(
        0.75, gt=0.0, le=1.0, description="largest weight of a silo in a branch's sum, relative to the sum of weights"
    )
    min_contributors: Number = Field(
        2.0,
        ge=1.0,
        le=1e30,
        description="smallest effective number of silos in a branch's sum, 1 / sum(w^2) of its relative weights w; a "
        "branch with fewer is left as it is",
    )
    threshold: Number = Field(
        2 / 3,
        ge=0.5,
        lt=1.0,
        description="a round is merged if more than this fraction of the silos that reported answer all its steps; "
        "fewer silos cannot learn another one's update, even together with the coordinator",
    )


#: Payload kinds besides updates that silos send and that have numbers to which noise can be added.
Statistic = Literal["modality_prototypes", "class_prototypes", "memory", "representations", "geometry", "loss", "map"]


class Noise(Part):
    """Clipping and noise of the payloads of one kind."""

    clip_norm: Positive = Field(description="maximum L2 norm of all numbers of a payload together")
    noise_multiplier: NonNegative = Field(
        0.0, description="Gaussian noise of standard deviation noise_multiplier * clip_norm on each number"
    )


class AdaptiveClip(Part):
    """Adaptive clipping: the clipping norm follows a quantile of the updates' norms (Andrew et al., NeurIPS 2021)."""

    quantile: Fraction = Field(
        0.5,
        description="target quantile: fraction of a round's updates that are to be no longer than the clipping norm",
    )
    rate: Positive = Field(
        0.2,
        description="learning rate of the clipping norm: after a round it is multiplied by exp(-rate * (b - "
        "quantile)), where b is the fraction of the round's updates that were no longer than it",
    )
    noise_multiplier: NonNegative = Field(
        0.0,
        description="Gaussian noise of standard deviation noise_multiplier / 2 on the sum from which b follows, to "
        "which each silo adds plus or minus 1/2",
    )


class ItemNoise(Part):
    """Differential privacy of a silo's single training items: its local steps are noised, see
    docs/explanation/privacy.md#single-items.
    """

    group: Count = Field(
        8,
        description="number of items of a group. A silo's items are split into groups once; a step takes each with "
        "probability min(1, batch_size / n), n the silo's number of items. A contrast has negatives of the group only",
    )
    clip_norm: Positive = Field(description="maximum L2 norm of the gradient of a group's loss; a longer one is scaled")
    noise_multiplier: NonNegative = Field(
        0.0,
        description="Gaussian noise of standard deviation noise_multiplier * clip_norm on each number of a step's sum "
        "of gradients",
    )


class Budget(Part):
    """Limit for each silo: all its replies of a run together are (epsilon, delta)-differentially private.

    With ``privacy.items`` this protects each of its training items, without them the silo's data as a whole.
    """

    epsilon: Positive = Field(description="largest epsilon; a task whose reply would pass it is refused by the silo")
    delta: Number = Field(1e-5, gt=0.0, lt=1.0, description="delta for which epsilon is computed")


class Privacy(Part):
    """Clipping and noise, which a silo applies to what it sends, a budget, and secure aggregation."""

    clip_norm: Positive | None = Field(None, description="maximum L2 norm of an update; a longer one is scaled down")
    noise_multiplier: NonNegative = Field(
        0.0,
        description="Gaussian noise of standard deviation noise_multiplier * clip_norm on each update, with "
        "secure_aggregation on their sum; needs clip_norm",
    )
    noise_from: Literal["seed", "key"] = Field(
        "seed",
        description="seed: the noise is reproducible, and anyone who knows the scenario can remove it; key: only the "
        "silo can derive it, from its private key and the update, so that the run cannot be replayed; not with "
        "launcher inline, which has no keys",
    )

    statistics: dict[Statistic, Noise] = Field(
        default_factory=dict,
        description="clipping and noise of other payloads than updates, by kind; counts of samples stay as they are",
    )
    items: ItemNoise | None = Field(
        None, description="clipping and noise in each local step, for a guarantee to single items; not with all methods"
    )
    least_support: Count = Field(
        1,
        description="a row of class_prototypes or memory with fewer samples is not sent; a silo with fewer training "
        "items is refused with a method that sends modality_prototypes",
    )
    adaptive_clip: AdaptiveClip | None = Field(
        None,
        description="clip_norm is the clipping norm of the first round only, and follows a quantile of the updates' "
        "norms afterwards; needs secure_aggregation, as the quantile is estimated from a sum",
    )
    budget: Budget | None = Field(
        None,
        description="limits the epsilon of each silo, or with items that of each training item; needs noise on all "
        "payloads that the method's silos send, with items on all but updates",
    )
    capture: bool = Field(
        False,
        description="the coordinator keeps what silos sent, decrypted, in captured/ of the run folder; fedmq audit "
        "--probe attacks it. Each merge takes as much disk space as its replies and the model",
    )
    secure_aggregation: SecureAggregation | None = Field(
        None,
        description="the coordinator learns the weighted sum of the updates, but none of them; true stands for the "
        "defaults of its keys. Needs mode sync, processes with keys and a method that adds a weighted sum",
    )

    @field_validator("secure_aggregation", mode="before", json_schema_input_type=bool | SecureAggregation | None)
    @classmethod
    def _short_form(cls, value: object) -> object:
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _noise_needs_clip(self) -> Privacy:
        if self.noise_multiplier > 0 and self.clip_norm is None:
            raise ConflictError("privacy.noise_multiplier", "needs privacy.clip_norm: noise is scaled by it")
        if self.noise_from == "key" and not self.noised:
            raise ConflictError("privacy.noise_from", "key needs privacy.noise_multiplier above 0: there is no noise")
        if self.items is not None and self.budget is not None:
            if self.items.noise_multiplier == 0:
                raise ConflictError("privacy.budget", "needs privacy.items.noise_multiplier above 0, or no items")
            if self.secure_aggregation is not None:
                why = "the noise of a sum is not the silo's own, so it does not count for items"
                raise ConflictError(
                    "privacy.budget", f"with privacy.items needs privacy.secure_aggregation null: {why}"
                )
        if self.adaptive_clip is not None and (self.clip_norm is None or self.secure_aggregation is None):
            raise ConflictError("privacy.adaptive_clip", "needs privacy.clip_norm and privacy.secure_aggregation")
        if self.adaptive_clip is not None and bool(self.adaptive_clip.noise_multiplier) != bool(self.noise_multiplier):
            raise ConflictError(
                "privacy.adaptive_clip.noise_multiplier", "and privacy.noise_multiplier: both above 0 or both 0"
            )
        return self

    @property
    def in_words(self) -> str:
        """What protects the updates, for the report of a run."""
        sums, told = self.secure_aggregation is not None, list[str]()
        if sums:
            told.append("The coordinator learned weighted sums of the updates, and none of the updates.")
        if self.items is not None:
            noise = self.items.noise_multiplier
            told.append(f"Local steps clip groups of items, with noise of {noise} times the norm.")
        if self.clip_norm is not None and not self.noise_multiplier:
            told.append(f"Updates were clipped to norm {self.clip_norm}, without noise: there is no formal guarantee.")
        elif self.clip_norm is not None:
            source = (
                "each silo's private key" if self.noise_from == "key" else "the scenario's seed, which anyone may know"
            )
            noised = "their sum was noised" if sums else "noised"
            told.append(
                f"Updates were clipped to norm {self.clip_norm} and {noised} (multiplier {self.noise_multiplier})."
            )
            told.append(f"The noise comes from {source}. fedmq audit computes epsilon.")
        if not told:
            told.append("Updates were neither clipped nor noised: the coordinator saw them as the silos computed them.")
        others = (f"{kind} (multiplier {noise.noise_multiplier:g})" for kind, noise in self.statistics.items())
        return " ".join(told) + (f" Also clipped and noised: {', '.join(others)}." if self.statistics else "")

    @property
    def noised(self) -> bool:
        """Whether anything that silos send, or their local steps, get noise."""
        in_steps = self.items is not None and self.items.noise_multiplier > 0
        return in_steps or any(multiplier > 0 for multiplier in self.multipliers.values())

    @property
    def multipliers(self) -> dict[str, float]:
        """The noise multipliers of what silos send, by their keys in this section."""
        found = {"noise_multiplier": self.noise_multiplier}
        found |= {
            f"statistics.{kind}.noise_multiplier": noise.noise_multiplier for kind, noise in self.statistics.items()
        }
        adaptive = self.adaptive_clip
        return found if adaptive is None else {**found, "adaptive_clip.noise_multiplier": adaptive.noise_multiplier}

    def check_fits(
        self, aggregation: Aggregation, compression: Compression, launcher: str, faults: Sequence[AnyFault]
    ) -> None:
        """Refuse what does not fit the scenario's other sections.

        Secure aggregation has no single updates, and adds in fixed point. Silos that have spent their budget would
        leave a buffer without enough replies.

        Raises:
            ConflictError: the keys, what was found, and why.
        """
        if self.budget is not None and aggregation.mode == "buffered":
            raise ConflictError(
                "privacy.budget", "needs aggregation.mode sync or async, not buffered: a buffer would wait"
            )
        changing = [fault.kind for fault in faults if isinstance(fault, Persistent)]
        if self.items is not None and changing:  # epsilon counts one set of groups
            raise ConflictError("privacy.items", f"needs faults that do not change a silo's items, not {changing[0]}")
        if self.noise_from == "key" and launcher == "inline":
            raise ConflictError(
                "privacy.noise_from",
                "key needs launcher local or none, as inline silos have no keys (compare and sweep: add --processes)",
            )
        if self.secure_aggregation is None:
            for fault in faults:
                if isinstance(fault, StepFault) and fault.step != "train":
                    raise ConflictError("faults", f"step {fault.step} needs privacy.secure_aggregation")
            return
        for place, found, allowed, why in (
            ("aggregation.mode", aggregation.mode, ("sync",), "only a whole round has a sum"),
            ("aggregation.robust.rule", aggregation.robust.rule, ("none",), "a rule compares single updates"),
            ("compression.updates.kind", compression.updates.kind, ("none",), "masked values cannot be compressed"),
            ("launcher", launcher, ("local", "none"), "silos need their own keys and each other's public ones"),
        ):
            if found not in allowed:
                values = " or ".join(allowed)
                raise ConflictError("privacy.secure_aggregation", f"needs {place} {values}, not {found}: {why}")
        least, most = NOISE_OF_SUMS
        for key, multiplier in self.multipliers.items():
            if multiplier and not least <= multiplier <= most:
                why = "other noise is too few or too many steps of the fixed point"
                allowed_here = f"0, or {least:g} to {most:g}"
                raise ConflictError(
                    "privacy.secure_aggregation", f"needs privacy.{key} {allowed_here}, not {multiplier:g}: {why}"
                )
