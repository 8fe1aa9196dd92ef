"""Parts of a scenario about time and chance: when replies are merged, who takes part, what a task costs.

The base class of all parts and the value types they share live here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Modality = Literal["image", "text"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]


class Part(BaseModel):
    """Every part of a scenario is frozen and refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Staleness(Part):
    """The damping h(s) of a reply that is s versions old; see :mod:`fedmq.federation.staleness`."""

    kind: Literal["constant", "polynomial", "hinge"] = Field(
        "polynomial", description="1, (1 + s)^-exponent, or 1 up to s = grace and 1 / (slope (s - grace) + 1) after"
    )
    exponent: NonNegative = Field(0.5, description="of polynomial")
    slope: NonNegative = Field(10.0, description="of hinge")
    grace: NonNegative = Field(4.0, description="versions that hinge forgives")


class Robust(Part):
    """A merge that a few Byzantine silos cannot steer; see :mod:`protocols._robust`."""

    rule: Literal["none", "norm_bound", "median", "trimmed_mean", "krum"] = Field(
        "none", description="of the merge: the method's own, or one that bounds what a few silos can do"
    )
    bound: Positive | None = Field(None, description="norm_bound: longest update (L2); null means their median length")
    trim: float = Field(0.2, ge=0.0, lt=0.5, description="trimmed_mean: share cut off at either end")
    byzantine: float = Field(0.2, ge=0.0, lt=0.5, description="krum: share of the replies that may be Byzantine")
    keep: Count | None = Field(
        None, description="krum: replies kept, fewer than silos; 1 is Krum, null means all but the Byzantine share"
    )


class Aggregation(Part):
    """When replies are merged. Keys of another mode than the one chosen are left alone."""

    mode: Literal["sync", "buffered", "async"] = Field(
        "sync", description="merge a whole cohort, or `buffer` replies (FedBuff), or each reply (FedAsync)"
    )
    quorum: Fraction = Field(1.0, gt=0.0, description="sync: share of the cohort that is enough after the deadline")
    deadline: Positive | None = Field(None, description="sync: seconds a round waits for stragglers; null for all")
    over_select: float = Field(
        1.0, ge=1.0, allow_inf_nan=False, description="sync: asks so many times the cohort and merges the first replies"
    )
    buffer: Count | None = Field(
        None, description="buffered: replies in a merge, at most the cohort; null means a third of the cohort"
    )
    timeout: Positive | None = Field(
        None, description="buffered: seconds after which fewer replies are merged; null waits for them"
    )
    mixing: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="buffered and async: share of a merge's step that is applied; null means 1 and 0.6"
    )
    staleness: Staleness = Staleness()
    balance: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] | None = Field(
        None,
        description="buffered and async: the fewer replies of a silo were merged, the more its next one counts, at "
        "most so many times; null counts all alike",
    )
    max_staleness: int | None = Field(None, ge=0, description="older replies are discarded; null takes all")
    max_age: int | None = Field(
        None, ge=0, description="versions after which a table of last-known statistics forgets a silo; null keeps all"
    )
    on_lost: Literal["wait", "give_up"] | None = Field(
        None,
        description="a silo that stays away: its task waits for it, or is given up after lost_after; null waits in "
        "virtual time, where nothing may depend on how long it really takes, and gives up in real time",
    )
    lost_after: Positive = Field(60.0, description="real seconds after which a silo that stays away is given up")

    @property
    def rate(self) -> float:
        """The share of a merge's step that is applied (FedBuff's server learning rate, FedAsync's mixing rate)."""
        match self.mode:
            case "sync":
                return 1.0
            case "buffered":
                return self.mixing or 1.0
            case "async":
                return self.mixing or 0.6

    robust: Robust = Robust()


class Diurnal(Part):
    """Silos that are on for a share of each day, every one from its own hour."""

    period: Positive = Field(86400.0, description="availability, if either is given: length of a day [s]")
    share: Fraction = Field(0.5, gt=0.0, description="availability, likewise: share of a day that a silo is on")


class Participation(Part):
    """Which silos are asked. A bare number in the scenario is the rate."""

    rate: float = Field(1.0, gt=0.0, le=1.0, description="share of the eligible silos asked in a round")
    kind: Literal["uniform", "by_data", "availability", "power_of_choice"] = Field(
        "uniform",
        description="all alike; by samples; those that are on, by a trace or by diurnal; those with the highest "
        "last-known loss",
    )
    candidates: Count | None = Field(
        None, description="power_of_choice: silos drawn to choose from; null means twice as many as are asked"
    )
    trace: Path | None = Field(None, description="availability: CSV with the columns silo, on, off [s]")
    repeat: Positive | None = Field(None, description="availability: the trace repeats after so long [s]")
    diurnal: Diurnal | None = Field(None, description="availability: made up instead of read")
    interrupted: Literal["wait", "lost"] = Field(
        "wait", description="availability: a silo that goes off with a task replies once it is on again, or never"
    )

    @model_validator(mode="after")
    def _trace_where_needed(self) -> Participation:
        given = (self.trace is not None) + (self.diurnal is not None)
        if self.kind == "availability" and given != 1:
            raise ValueError("participation.kind availability needs participation.trace or participation.diurnal")
        if self.kind != "availability" and (given or self.repeat):
            raise ValueError("participation.trace, .repeat and .diurnal are for participation.kind availability")
        if self.repeat and self.trace is None:
            raise ValueError("participation.repeat is for participation.trace")
        return self


class DeviceClass(Part):
    """Silos of one kind of machine."""

    slowdown: Positive = Field(description="how many times slower than an average silo")
    share: Fraction = Field(0.0, description="share of all silos, rounded to whole silos that the seed chooses")
    silos: tuple[Name, ...] = Field((), description="silos by name, beside the share")


#: Rough orders of magnitude, not measurements. Any value written beside a preset replaces the preset's.
COST_PRESETS: Mapping[str, Mapping[str, float | str]] = {
    "hospital": {
        "seconds_per_sample": 0.02,
        "jitter_sigma": 0.2,
        "latency": 0.02,
        "down_bandwidth": 25e6,
        "up_bandwidth": 6e6,
        "loss": 0.001,
    },
    "bank": {
        "seconds_per_sample": 0.005,
        "speed_sigma": 0.2,
        "jitter_sigma": 0.05,
        "latency": 0.01,
        "bandwidth": 125e6,
    },
    "edge": {
        "seconds_per_sample": 0.1,
        "speed_sigma": 1.0,
        "jitter": "pareto",
        "latency": 0.1,
        "down_bandwidth": 6e6,
        "up_bandwidth": 1.2e6,
        "loss": 0.02,
    },
    "gpu_farm": {
        "seconds_per_sample": 0.0005,
        "speed_sigma": 0.1,
        "jitter_sigma": 0.05,
        "latency": 0.0005,
        "bandwidth": 1.25e9,
    },
}


class Cost(Part):
    """What a task costs in virtual time."""

    preset: Literal["hospital", "bank", "edge", "gpu_farm"] | None = Field(
        None, description="values for all that is not given"
    )
    seconds_per_sample: NonNegative = Field(
        0.01, description="compute of one sample in one epoch on an average silo [s]"
    )
    speed_sigma: NonNegative = Field(0.5, description="log-normal spread of silo speeds")
    classes: dict[Name, DeviceClass] = Field(default_factory=dict, description="device classes, by name")
    jitter: Literal["lognormal", "pareto"] = Field("lognormal", description="spread from task to task; median 1")
    jitter_sigma: NonNegative = Field(0.1, description="lognormal: spread from task to task")
    jitter_tail: Positive = Field(1.5, description="pareto: exponent of the tail; heavier the smaller")
    latency: NonNegative = Field(0.05, description="one way [s]")
    bandwidth: Positive = Field(10e6, description="of a silo's link, both ways [bytes/s]")
    down_bandwidth: Positive | None = Field(None, description="to the silo, if not `bandwidth` [bytes/s]")
    up_bandwidth: Positive | None = Field(None, description="from the silo, if not `bandwidth` [bytes/s]")
    loss: float = Field(0.0, ge=0.0, lt=1.0, description="share of messages lost on the way and sent again")

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset")
        return {**COST_PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given

    @model_validator(mode="after")
    def _shares_fit(self) -> Cost:
        if sum(each.share for each in self.classes.values()) > 1.0 + 1e-9:
            raise ValueError("the shares of cost.classes must sum to at most 1")
        named = [silo for each in self.classes.values() for silo in each.silos]
        twice = next((silo for silo in named if named.count(silo) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is in two of cost.classes, allowed is one")
        return self
