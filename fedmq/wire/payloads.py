"""The closed set of payloads: what a message can carry. docs/reference/wire.md describes each.

A payload declares its fields once, in ``FIELDS``; construction and decoding both go through that declaration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from fedmq.wire.fields import (
    DIGEST,
    I63,
    LAYER,
    METRIC,
    NAME,
    Field,
    FieldError,
    Names,
    Numbers,
    NumbersByName,
    Real,
    Tensor,
    Text,
    Whole,
    Word,
)
from fedmq.wire.layout import MAX_ENTRIES

IMAGE = 1
TEXT = 2

F32: TypeAlias = npt.NDArray[np.float32]
I64: TypeAlias = npt.NDArray[np.int64]
Buffer: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint8]


def _check(payload: Payload) -> None:
    """Check every field of a payload against its declaration."""
    dims: dict[str, int] = {}
    for name, spec in payload.FIELDS.items():
        spec.check(f"{payload.KIND}.{name}", getattr(payload, name), dims)


_MODALITY = re.compile(r"image|text|both")
_DIGEST = Word(DIGEST)
_SAMPLES = Whole(0, I63)
_MASK = Whole(0, IMAGE | TEXT)
_BULK = Tensor(("float32", "uint8"), ("n",), bulk=True)
_METRICS = Numbers(256, METRIC)


@dataclass(frozen=True, eq=False)
class Model:
    """A model's parameters.

    Args:
        layout_digest: of the agreed layout, 64 hexadecimal digits.
        buffer: (n,) float32, or uint8 where the layout mixes dtypes.
    """

    KIND: ClassVar[str] = "model"
    FIELDS: ClassVar[Mapping[str, Field]] = {"layout_digest": _DIGEST, "buffer": _BULK}
    layout_digest: str
    buffer: Buffer

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class Delta:
    """A silo's change Δ of all shared parameters.

    Args:
        layout_digest: of the agreed layout.
        buffer: (n,) float32, or uint8 where the layout mixes dtypes.
        n_samples: local samples behind it.
    """

    KIND: ClassVar[str] = "delta"
    FIELDS: ClassVar[Mapping[str, Field]] = {"layout_digest": _DIGEST, "buffer": _BULK, "n_samples": _SAMPLES}
    layout_digest: str
    buffer: Buffer
    n_samples: int

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class PartialDelta:
    """A silo's change Δ of some layers.

    Args:
        layout_digest: of the agreed layout the layers are named in.
        names: the layers, different, in the order of the buffer; none of a silo that trains no layer that is shared.
        buffer: (n,) float32 or uint8: the layers one after the other.
        n_samples: local samples behind it.
    """

    KIND: ClassVar[str] = "partial_delta"
    FIELDS: ClassVar[Mapping[str, Field]] = {
        "layout_digest": _DIGEST,
        "names": Names(MAX_ENTRIES, LAYER, least=0),
        "buffer": replace(_BULK, least=0),
        "n_samples": _SAMPLES,
    }
    layout_digest: str
    names: tuple[str, ...]
    buffer: Buffer
    n_samples: int

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class ModalityPrototypes:
    """One prototype per modality.

    Args:
        image: (d,) float32; a filler where the mask lacks the bit.
        text: (d,) float32; likewise.
        mask: bit 0 (value 1) image, bit 1 (value 2) text: which of the two are real.
    """

    KIND: ClassVar[str] = "modality_prototypes"
    FIELDS: ClassVar[Mapping[str, Field]] = {
        "image": Tensor(("float32",), ("d",)),
        "text": Tensor(("float32",), ("d",)),
        "mask": _MASK,
    }
    image: F32
    text: F32
    mask: int

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class ClassPrototypes:
    """One prototype per class.

    Args:
        prototypes: (C, r) float32.
        counts: (C,) int64, at least 0; 0 marks an absent row.
        modality: ``image``, ``text`` or ``both``.
    """

    KIND: ClassVar[str] = "class_prototypes"
    FIELDS: ClassVar[Mapping[str, Field]] = {
        "prototypes": Tensor(("float32",), ("C", "r")),
        "counts": Tensor(("int64",), ("C",), low=0),
        "modality": Word(_MODALITY),
    }
    prototypes: F32
    counts: I64
    modality: str

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class Memory:
    """FedCAFE's memory of centroids.

    Args:
        centroids: (C, r) float32.
        support: (C,) int64, at least 0: samples behind each row.
    """

    KIND: ClassVar[str] = "memory"
    FIELDS: ClassVar[Mapping[str, Field]] = {
        "centroids": Tensor(("float32",), ("C", "r")),
        "support": Tensor(("int64",), ("C",), low=0),
    }
    centroids: F32
    support: I64

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class RouterStatistics:
    """What RCSR's router is told beside prototypes, geometry and loss; downwards, what it tells a silo.

    Args:
        mask: up: modalities the silo has (bit 0 image, bit 1 text).
        n_samples: up: local samples.
        weight: down: the silo's own router weight of its last participation, in [0, 1].
    """

    KIND: ClassVar[str] = "router_statistics"
    FIELDS: ClassVar[Mapping[str, Field]] = {
        "mask": Whole(0, IMAGE | TEXT, nullable=True),
        "n_samples": Whole(0, I63, nullable=True),
        "weight": Real(0.0, 1.0, nullable=True),
    }
    mask: int | None = None
    n_samples: int | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class Geometry:
    """RCSR's four numbers about Δ: values (4,) float32."""

    KIND: ClassVar[str] = "geometry"
    FIELDS: ClassVar[Mapping[str, Field]] = {"values": Tensor(("float32",), (4,))}
    values: F32

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class Loss:
    """Mean training loss."""

    KIND: ClassVar[str] = "loss"
    FIELDS: ClassVar[Mapping[str, Field]] = {"value": Real()}
    value: float

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class MeanAveragePrecision:
    """Local validation mAP, a fraction in [0, 1]."""

    KIND: ClassVar[str] = "map"
    FIELDS: ClassVar[Mapping[str, Field]] = {"value": Real(0.0, 1.0)}
    value: float

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class LabelCount:
    """Number of categories present in the silo."""

    KIND: ClassVar[str] = "label_count"
    FIELDS: ClassVar[Mapping[str, Field]] = {"value": Whole(0, (1 << 31) - 1)}
    value: int

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class Representations:
    """Representations of the public items.

    Args:
        values: (N, d) float16 or float32.
        modality: ``image``, ``text`` or ``both``.
    """

    KIND: ClassVar[str] = "representations"
    FIELDS: ClassVar[Mapping[str, Field]] = {
        "values": Tensor(("float16", "float32"), ("N", "d")),
        "modality": Word(_MODALITY),
    }
    values: npt.NDArray[np.float16] | F32
    modality: str

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class DiscriminatorDelta:
    """A silo's change of FedHAP's discriminator; fields as in Delta, the layout is the discriminator's own.

    Downwards the shared discriminator's change since it was drawn, with ``n_samples`` 0.
    """

    KIND: ClassVar[str] = "discriminator_delta"
    FIELDS: ClassVar[Mapping[str, Field]] = Delta.FIELDS
    layout_digest: str
    buffer: Buffer
    n_samples: int

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class SecretShare:
    """Masked integers of secure aggregation.

    Args:
        values: (n,) uint32 or uint64, each below 2**modulus_bits.
        round: the round the masks belong to.
        modulus_bits: the sums are taken modulo 2**modulus_bits; 1 to 32 for uint32, to 64 for uint64.
    """

    KIND: ClassVar[str] = "share"
    FIELDS: ClassVar[Mapping[str, Field]] = {
        "values": Tensor(("uint32", "uint64"), ("n",)),
        "round": Whole(0, I63),
        "modulus_bits": Whole(1, 64),
    }
    values: npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
    round: int
    modulus_bits: int

    def __post_init__(self) -> None:
        _check(self)
        width = self.values.dtype.itemsize * 8
        if self.modulus_bits > width:
            raise FieldError(f"share.modulus_bits: {self.modulus_bits} for integers of {width} bits")
        if self.modulus_bits < width and int(self.values.max()) >> self.modulus_bits:
            raise FieldError(f"share.values: a value is not below 2**{self.modulus_bits}")


@dataclass(frozen=True, eq=False)
class Metrics:
    """Named numbers, and for each silo its own.

    Args:
        values: metric name to finite float, at most 256.
        per_silo: silo name to such a mapping, at most 1024 silos.
    """

    KIND: ClassVar[str] = "metrics"
    FIELDS: ClassVar[Mapping[str, Field]] = {"values": _METRICS, "per_silo": NumbersByName(1024, NAME, _METRICS)}
    values: Mapping[str, float]
    per_silo: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, eq=False)
class Error:
    """Something went wrong on the sender's side.

    Args:
        code: a short fixed word.
        text: for a reader, at most 1024 bytes of UTF-8.
    """

    KIND: ClassVar[str] = "error"
    FIELDS: ClassVar[Mapping[str, Field]] = {"code": Word(NAME), "text": Text(1024)}
    code: str
    text: str

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def saying(cls, code: str, text: str) -> Error:
        """An error with a text of any length and any characters, cut and replaced as the wire needs."""
        return cls(code, text.encode(errors="replace")[:1000].decode(errors="ignore"))


Payload: TypeAlias = (
    Model
    | Delta
    | PartialDelta
    | ModalityPrototypes
    | ClassPrototypes
    | Memory
    | RouterStatistics
    | Geometry
    | Loss
    | MeanAveragePrecision
    | LabelCount
    | Representations
    | DiscriminatorDelta
    | SecretShare
    | Metrics
    | Error
)
PAYLOADS: Mapping[str, type[Payload]] = {each.KIND: each for each in get_args(Payload)}


def tensors(payload: Payload) -> list[npt.NDArray[Any]]:
    """The payload's arrays in the order of its declaration, which is their order on the wire."""
    return [getattr(payload, name) for name, spec in payload.FIELDS.items() if isinstance(spec, Tensor)]


def tensor_bytes(payload: Payload) -> int:
    """Bytes of the payload's tensors; scalars and names are not counted."""
    return sum(array.nbytes for array in tensors(payload))


#: Digests of payloads that are still alive: a model that goes to fifteen silos is hashed once.
_DIGESTS: WeakKeyDictionary[Payload, str] = WeakKeyDictionary()


def digest(payload: Payload) -> str:
    """BLAKE3 (hex) over a payload's kind and every field of it: equal digests, equal payloads, to the bit.

    SHA-256, four times slower on one core, took a third of an update's way from a silo into the sum.
    """
    known = _DIGESTS.get(payload)
    if known is None:
        known = _DIGESTS[payload] = _digest(payload)
    return known


def _digest(payload: Payload) -> str:
    total = blake3(payload.KIND.encode())
    for name, spec in payload.FIELDS.items():
        value = getattr(payload, name)
        if isinstance(value, np.ndarray):
            total.update(f"\0{name}\0{value.dtype.name}{value.shape}\0".encode())
            total.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        else:
            total.update(f"\0{name}\0{_as_decoded(spec, value)!r}".encode())
    return total.hexdigest()


def _as_decoded(spec: Field, value: Any) -> Any:
    """A field's value as the receiver has it: both ends of a message log its digest."""
    match spec:
        case Real():
            return None if value is None else float(value)
        case Numbers():
            return {each: float(number) for each, number in sorted(value.items())}
        case NumbersByName():
            return {each: {own: float(x) for own, x in inner.items()} for each, inner in sorted(value.items())}
        case _:
            return value
