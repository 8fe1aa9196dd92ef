"""All payloads that messages can carry; docs/reference/wire.md describes each.

A payload is declared only here, by its kind and the type and allowed values of each field. Construction, encoding,
decoding, digests and the audit's policy all use this declaration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from fedmq.errors import DivergedError
from fedmq.wire.compression import sent_bytes
from fedmq.wire.fields import (
    DIGEST,
    I63,
    LABEL,
    LAYER,
    METRIC,
    NAME,
    Field,
    FieldError,
    FloatMap,
    Names,
    Real,
    Tensor,
    Text,
    Whole,
    Word,
)
from fedmq.wire.layout import MAX_ENTRIES

IMAGE, TEXT = 1, 2

F32: TypeAlias = npt.NDArray[np.float32]
I64: TypeAlias = npt.NDArray[np.int64]
F64: TypeAlias = npt.NDArray[np.float64]
U8: TypeAlias = npt.NDArray[np.uint8]


class Payload:
    """Base of all payloads. Each kind is a frozen dataclass, declared with :func:`payload`.

    Raises:
        FieldError: on construction: a field has the wrong type, dtype or shape, or is out of bounds.
    """

    KIND: ClassVar[str]
    FIELDS: ClassVar[Mapping[str, Field]]  # declarations of its fields by name, in the order of the wire

    def __post_init__(self) -> None:
        dims: dict[str, int] = {}
        for name, spec in self.FIELDS.items():
            spec.check(f"{self.KIND}.{name}", getattr(self, name), dims)

    @cached_property
    def largest(self) -> float:
        """Largest magnitude in a model or an update, found once; NaN or infinite if a value is; 0 in other payloads."""
        bulk = [getattr(self, name) for name, spec in self.FIELDS.items() if isinstance(spec, Tensor) and spec.bulk]
        return float(np.max([Tensor.largest(array) for array in bulk], initial=0.0))


PayloadT = TypeVar("PayloadT", bound=Payload)
_DECLARED: dict[str, type[Payload]] = {}
#: All payloads by kind, in the order of declaration. Messages carry those declared in this module.
PAYLOADS: Mapping[str, type[Payload]] = MappingProxyType(_DECLARED)


def payload(kind: str) -> Callable[[type[PayloadT]], type[PayloadT]]:
    """Declare a dataclass as the payload ``kind``; each field is ``Annotated`` with its declaration.

    Raises:
        TypeError: the kind is already declared, or a field lacks a declaration.
    """

    def declare(cls: type[PayloadT]) -> type[PayloadT]:
        if kind in _DECLARED:
            raise TypeError(f"{cls.__name__}: the payload {kind} is already declared by {_DECLARED[kind].__name__}")
        hints, known = get_type_hints(cls, include_extras=True), get_args(Field)
        specs: dict[str, Field] = {}
        for name in cls.__annotations__:
            found = [spec for spec in getattr(hints[name], "__metadata__", ()) if isinstance(spec, known)]
            if len(found) != 1:
                allowed = ", ".join(spec.__name__ for spec in known)
                raise TypeError(f"{cls.__name__}.{name}: not Annotated with one of {allowed}")
            specs[name] = found[0]
        cls.KIND, cls.FIELDS = kind, MappingProxyType(specs)
        _DECLARED[kind] = cls
        return cls

    return declare


_MODALITY = re.compile(r"image|text|both")
_DTYPE = re.compile(r"float32|uint8|int32|none")
#: Digest of a frozen encoder, or none.
ENCODER = re.compile(r"[0-9a-f]{64}|none")
#: Maximum number of label names, and of words in a vocabulary.
_MOST_LABELS, _MOST_WORDS = 10_000, 50_000
_SHAPE = Tensor(("int64",), ("r",), low=1, least=0)
_SCALE = Tensor(("float32",), ("C",), least=0)
#: Code of the error of a task whose training diverged.
DIVERGED = "training_diverged"
#: Maximum size of a run's status [bytes].
MAX_STATUS = 1 << 20
_RULE = re.compile(r"kinds|fields|bytes_per_payload|bytes_per_message|bytes_in_all")
_DIGEST = Word(DIGEST)
_SAMPLES = Whole(0, I63)
_MASK = Whole(0, IMAGE | TEXT)
_BULK = Tensor(("float32",), ("n",), bulk=True)
_METRICS = FloatMap(256, METRIC)
_METRICS_BY_SILO = FloatMap(1024, NAME, _METRICS)


@payload("model")
@dataclass(frozen=True, eq=False)
class Model(Payload):
    """A model's parameters."""

    layout_digest: Annotated[str, _DIGEST]  # digest of the agreed layout, 64 hexadecimal digits
    buffer: Annotated[F32, _BULK]  # float32 (n,)


@payload("delta")
@dataclass(frozen=True, eq=False)
class Delta(Payload):
    """A silo's update Δ of all shared parameters."""

    layout_digest: Annotated[str, _DIGEST]  # digest of the agreed layout
    buffer: Annotated[F32, _BULK]  # float32 (n,)
    n_samples: Annotated[int, _SAMPLES]  # number of local training samples


@payload("partial_delta")
@dataclass(frozen=True, eq=False)
class PartialDelta(Payload):
    """A silo's update Δ of some layers."""

    layout_digest: Annotated[str, _DIGEST]  # digest of the agreed layout that has these layers
    # Distinct layer names, in the order of the buffer; empty if the silo trains no shared layer.
    names: Annotated[tuple[str, ...], Names(MAX_ENTRIES, LAYER, least=0)]
    buffer: Annotated[F32, replace(_BULK, least=0)]  # float32 (n,), the layers concatenated
    n_samples: Annotated[int, _SAMPLES]  # number of local training samples


@payload("modality_prototypes")
@dataclass(frozen=True, eq=False)
class ModalityPrototypes(Payload):
    """One prototype per modality."""

    image: Annotated[F32, Tensor(("float32",), ("d",))]  # (d,) float32; a placeholder if its bit of the mask is 0
    text: Annotated[F32, Tensor(("float32",), ("d",))]  # (d,) float32; likewise
    mask: Annotated[int, _MASK]  # which prototypes are present: bit 0 (value 1) image, bit 1 (value 2) text


@payload("class_prototypes")
@dataclass(frozen=True, eq=False)
class ClassPrototypes(Payload):
    """One prototype per class."""

    prototypes: Annotated[F32, Tensor(("float32",), ("C", "r"))]  # (C, r) float32
    # (C,) int64, samples per class, at least 0; 0 marks an absent row.
    counts: Annotated[I64, Tensor(("int64",), ("C",), low=0)]
    modality: Annotated[str, Word(_MODALITY)]  # ``image``, ``text`` or ``both``


@payload("memory")
@dataclass(frozen=True, eq=False)
class Memory(Payload):
    """FedCAFE's memory of centroids."""

    centroids: Annotated[F32, Tensor(("float32",), ("C", "r"))]  # (C, r) float32
    support: Annotated[I64, Tensor(("int64",), ("C",), low=0)]  # (C,) int64, samples per centroid, at least 0


@payload("router_statistics")
@dataclass(frozen=True, eq=False)
class RouterStatistics(Payload):
    """The silo's weight from RCSR's router at its last participation, in [0, 1]."""

    weight: Annotated[float, Real(0.0, 1.0)]


@payload("router_sums")
@dataclass(frozen=True, eq=False)
class RouterSums(Payload):
    """What RCSR's router needs if silos weigh themselves; a silo's part of the sums never leaves it in clear."""

    values: Annotated[F32, Tensor(("float32",), ("n",))]  # the router's parameters; from a silo: its loss's gradient
    rows: Annotated[F32, Tensor(("float32",), ("C", "r"))]  # what the last merge added up; from a silo: what it adds
    support: Annotated[I64, Tensor(("int64",), ("C",), low=0)]  # 1 of a row that there is, 0 of others


@payload("clip_norm")
@dataclass(frozen=True, eq=False)
class ClipNorm(Payload):
    """The present norm to which updates are clipped, if clipping is adaptive."""

    value: Annotated[float, Real(1e-6, 1e6)]


@payload("geometry")
@dataclass(frozen=True, eq=False)
class Geometry(Payload):
    """RCSR's four statistics of the update Δ: ``values`` (4,) float32."""

    values: Annotated[F32, Tensor(("float32",), (4,))]


@payload("loss")
@dataclass(frozen=True, eq=False)
class Loss(Payload):
    """Mean training loss."""

    value: Annotated[float, Real()]


@payload("map")
@dataclass(frozen=True, eq=False)
class MeanAveragePrecision(Payload):
    """Local validation mAP, a fraction in [0, 1]."""

    value: Annotated[float, Real(0.0, 1.0)]


@payload("label_count")
@dataclass(frozen=True, eq=False)
class LabelCount(Payload):
    """Number of categories present in the silo."""

    value: Annotated[int, Whole(0, (1 << 31) - 1)]


@payload("representations")
@dataclass(frozen=True, eq=False)
class Representations(Payload):
    """Representations of the public items."""

    # (N, d) float16 or float32.
    values: Annotated[npt.NDArray[np.float16] | F32, Tensor(("float16", "float32"), ("N", "d"))]
    modality: Annotated[str, Word(_MODALITY)]  # ``image``, ``text`` or ``both``


@payload("discriminator_delta")
@dataclass(frozen=True, eq=False)
class DiscriminatorDelta(Payload):
    """A silo's update of FedHAP's discriminator; fields as in Delta, with the discriminator's layout.

    To a silo: the change of the shared discriminator since its initialisation, with ``n_samples`` 0.
    """

    layout_digest: Annotated[str, _DIGEST]
    buffer: Annotated[F32, _BULK]
    n_samples: Annotated[int, _SAMPLES]


@payload("control_variate")
@dataclass(frozen=True, eq=False)
class ControlVariate(Payload):
    """SCAFFOLD's control variate c: the mean of those of all silos."""

    layout_digest: Annotated[str, _DIGEST]  # digest of the agreed layout
    buffer: Annotated[F32, _BULK]  # float32 (n,)
    counted: Annotated[int, _SAMPLES]  # 1 + base version of the silo's last reply that c counts; 0 if there is none


@payload("local_steps")
@dataclass(frozen=True, eq=False)
class LocalSteps(Payload):
    """Optimiser steps that a silo took in a task."""

    # (3,) int64, of the image branch, the text branch and the shared layers; 0 for one that it does not train.
    values: Annotated[I64, Tensor(("int64",), (3,), low=0)]


@payload("update_report")
@dataclass(frozen=True, eq=False)
class UpdateReport(Payload):
    """What a silo reports of an update that it keeps for a secure sum: what it is weighted by, and keys for the sum."""

    n_samples: Annotated[int, _SAMPLES]  # number of local training samples
    trained: Annotated[tuple[str, ...], Names(MAX_ENTRIES, LAYER, least=0)]  # branches that it changes
    # (C,) int64, samples behind each row, such as a class prototype, that it keeps for the sum as well; 0 of a row that
    # it lacks.
    support: Annotated[I64, Tensor(("int64",), ("C",), low=0, least=0)]
    roster: Annotated[str, _DIGEST]  # digest of the silos and public keys that it accepts
    # (2, 32) uint8: public X25519 keys of this round, of its masks and of the shares sealed for it.
    keys: Annotated[U8, Tensor(("uint8",), (2, 32))]
    commitment: Annotated[U8, Tensor(("uint8",), (32,))]  # SHA-256 of the seed of its own mask
    signature: Annotated[U8, Tensor(("uint8",), (64,))]  # Ed25519, by its key, over all the above but the first three


@payload("sum_keys")
@dataclass(frozen=True, eq=False)
class SumKeys(Payload):
    """The keys of all silos that reported in a round, as each sent and signed them."""

    silos: Annotated[tuple[str, ...], Names(1024, NAME)]  # names, in the order of the run
    keys: Annotated[U8, Tensor(("uint8",), ("N", 2, 32))]
    commitments: Annotated[U8, Tensor(("uint8",), ("N", 32))]
    signatures: Annotated[U8, Tensor(("uint8",), ("N", 64))]


@payload("sealed_shares")
@dataclass(frozen=True, eq=False)
class SealedShares(Payload):
    """Shares of silos' secrets: of the sender for each other silo, or of each silo for the receiver."""

    # (N, 60) uint8, in the order of the keys; zeros for the silo itself, and for those that sent none.
    sealed: Annotated[U8, Tensor(("uint8",), ("N", 60))]


@payload("sum_weights")
@dataclass(frozen=True, eq=False)
class SumWeights(Payload):
    """All weights of a secure sum."""

    layout_digest: Annotated[str, _DIGEST]  # digest of the agreed layout
    silos: Annotated[tuple[str, ...], Names(1024, NAME)]  # names, in the order of the run
    branches: Annotated[tuple[str, ...], Names(MAX_ENTRIES, LAYER)]  # names of the branches
    # (C, N) float64, at least 0: weight of each silo in each branch's sum; 0 of one that does not take part in it.
    weights: Annotated[F64, Tensor(("float64",), ("C", "N"))]


@payload("masked_update")
@dataclass(frozen=True, eq=False)
class MaskedUpdate(Payload):
    """A silo's weighted update in fixed point, with all its masks."""

    layout_digest: Annotated[str, _DIGEST]  # digest of the agreed layout
    # uint32 (n,): the branches in whose sums the silo takes part, in the order of the weights.
    buffer: Annotated[npt.NDArray[np.uint32], Tensor(("uint32",), ("n",), least=0)]


@payload("survivors")
@dataclass(frozen=True, eq=False)
class Survivors(Payload):
    """The silos whose masked updates are in a secure sum; the others of its weights are not."""

    silos: Annotated[tuple[str, ...], Names(1024, NAME)]  # names, in the order of the run


@payload("revealed_shares")
@dataclass(frozen=True, eq=False)
class RevealedShares(Payload):
    """A silo's share of one secret of each silo: of its own mask if its update is in the sum, otherwise of its key."""

    shares: Annotated[U8, Tensor(("uint8",), ("N", 16))]  # (N, 16) uint8, in the order of the weights


@payload("metrics")
@dataclass(frozen=True, eq=False)
class Metrics(Payload):
    """Metrics of a model, overall and per silo."""

    values: Annotated[Mapping[str, float], _METRICS]  # metric name to finite float, at most 256
    # Silo name to such a mapping, at most 1024 silos.
    per_silo: Annotated[Mapping[str, Mapping[str, float]], _METRICS_BY_SILO] = field(default_factory=dict)


@payload("silo_metrics")
@dataclass(frozen=True, eq=False)
class SiloMetrics(Payload):
    """Metrics of the shared model on a silo's own held-out items."""

    items: Annotated[int, _SAMPLES]  # number of these items that have both modalities
    # Metric name to finite float, at most 256; empty without such items.
    values: Annotated[Mapping[str, float], _METRICS]


@payload("data_statement")
@dataclass(frozen=True, eq=False)
class DataStatement(Payload):
    """What a silo or the evaluator states about its data before it joins a run."""

    data: Annotated[str, _DIGEST]  # salted digest of the data, salted_digest
    mask: Annotated[int, _MASK]  # the modalities it has (bit 0 image, bit 1 text)
    # (5, 3) int64, at least 0: items of the splits train, val, test, public and database with both modalities, with an
    # image only and with captions only. In a simulated partition those assigned to the silo.
    counts: Annotated[I64, Tensor(("int64",), (5, 3), low=0)]


@payload("data_format")
@dataclass(frozen=True, eq=False)
class DataFormat(Payload):
    """Labels and model inputs of a data set; of a silo, or those that all silos of a run agree on."""

    label_names: Annotated[tuple[str, ...], Names(_MOST_LABELS, LABEL, least=0)]  # names of the labels, in order
    # Words of the bags of words, in order; empty for other texts.
    vocabulary: Annotated[tuple[str, ...], Names(_MOST_WORDS, LABEL, least=0)]
    image_shape: Annotated[I64, _SHAPE]  # shape of an item's image input; empty without images
    text_shape: Annotated[I64, replace(_SHAPE, shape=("d",))]  # shape of a caption's input; empty without captions
    image_dtype: Annotated[str, Word(_DTYPE)]  # ``float32`` for features, ``uint8`` for pixels, ``none`` without images
    # ``float32`` for features, ``int32`` for token ids, ``none`` without captions.
    text_dtype: Annotated[str, Word(_DTYPE)]
    # Digest of the frozen image encoder; ``none`` for features from a file.
    image_encoder: Annotated[str, Word(ENCODER)]
    text_encoder: Annotated[str, Word(ENCODER)]  # digest of the frozen text encoder and its tokenizer; likewise
    mean: Annotated[F32, _SCALE]  # (C,) float32, mean of each channel of pixels; empty for features
    std: Annotated[F32, _SCALE]  # (C,) float32, their standard deviation; likewise


@payload("silo_modalities")
@dataclass(frozen=True, eq=False)
class SiloModalities(Payload):
    """The silos of a run and the modalities that each has."""

    silos: Annotated[tuple[str, ...], Names(1024, NAME)]  # names, in the order of the run
    # (N,) int64, the modalities of each (bit 0 image, bit 1 text).
    masks: Annotated[I64, Tensor(("int64",), ("N",), low=1)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.masks) != len(self.silos) or int(self.masks.max()) > IMAGE | TEXT:
            raise FieldError("silo_modalities.masks: not one mask of image and text for each silo")


@payload("error")
@dataclass(frozen=True, eq=False)
class Error(Payload):
    """An error at the sender."""

    code: Annotated[str, Word(NAME)]  # a short fixed word
    text: Annotated[str, Text(1024)]  # for a reader, at most 1024 bytes of UTF-8

    @classmethod
    def of_task(cls, error: Exception, text: str) -> Error:
        """The error of a task: code ``training_diverged`` if its training diverged, otherwise ``training_failed``."""
        return cls.saying(DIVERGED if isinstance(error, DivergedError) else "training_failed", text)

    @classmethod
    def saying(cls, code: str, text: str) -> Error:
        """An error with any text, which is cut to 1000 bytes and made valid UTF-8."""
        return cls(code, text.encode(errors="replace")[:1000].decode(errors="ignore"))


class WithheldBy(StrEnum):
    """Rule of a silo's policy that an answer would break."""

    KINDS = "kinds"
    FIELDS = "fields"
    BYTES_PER_PAYLOAD = "bytes_per_payload"
    BYTES_PER_MESSAGE = "bytes_per_message"
    BYTES_IN_ALL = "bytes_in_all"


_WITHHELD = re.compile("|".join((*PAYLOADS, "reply", "heartbeat", "statement", "silo_result")))


@payload("refusal")
@dataclass(frozen=True, eq=False)
class Refusal(Payload):
    """A silo's answer in place of one that its own policy forbids to leave."""

    rule: Annotated[str, Word(_RULE)]  # a value of WithheldBy
    # Kind of the payload that breaks it, or of the message if the message as a whole does. Only fixed words are
    # allowed, so that nothing can hide in it.
    withheld: Annotated[str, Word(_WITHHELD)]


@payload("run_status")
@dataclass(frozen=True, eq=False)
class RunStatus(Payload):
    """The run's status, for an operator."""

    json: Annotated[str, Text(MAX_STATUS)]  # the content of ``status.json`` (StatusFile), at most 1 MiB of UTF-8


def tensors(payload: Payload) -> list[npt.NDArray[Any]]:
    """The payload's arrays in the order of their declaration and of the wire."""
    return [getattr(payload, name) for name, spec in payload.FIELDS.items() if isinstance(spec, Tensor)]


def tensor_bytes(payload: Payload) -> int:
    """Size of the payload's tensors as they travel [bytes], without scalars and names."""
    return sum(map(sent_bytes, tensors(payload)))


def decoded_bytes(payload: Payload) -> int:
    """Size of the payload's tensors once decoded [bytes]; differs from :func:`tensor_bytes` if one is compressed."""
    return sum(array.nbytes for array in tensors(payload))


def sizes(payloads: Iterable[Payload]) -> list[tuple[str, int]]:
    """Kind and tensor bytes of each payload."""
    return [(payload.KIND, tensor_bytes(payload)) for payload in payloads]


def decoded_sizes(payloads: Iterable[Payload]) -> list[int] | None:
    """Tensor bytes of each payload once decoded; None if none of them is compressed."""
    found = [(tensor_bytes(payload), decoded_bytes(payload)) for payload in payloads]
    return [whole for _, whole in found] if any(sent != whole for sent, whole in found) else None
