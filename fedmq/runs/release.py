"""A released model: its configuration, its files and their digests, and the signature of its folder. Without torch.

``signature.json`` has the SHA-256 of every file of the folder and an Ed25519 signature over them: who released these
files, and were they changed since? Encoded galleries (``gallery/``) are not part of a release and are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field, JsonValue

from fedmq.config.scenario import Objective
from fedmq.errors import InputError
from fedmq.evaluation.metrics import shown
from fedmq.models.objective_registry import network_of
from fedmq.runs.results import gallery_of, meaningful, read_summary, with_own_figures
from fedmq.runs.run_records import RunSummary
from fedmq.storage.json_files import Count, Digest, Finite, Stored, read_json
from fedmq.storage.regular_files import check_regular, open_regular
from fedmq.storage.run_folder import RunFolder, write_json
from fedmq.wire.fields import FieldError
from fedmq.wire.keys import Identity, public_key_of
from fedmq.wire.layout import MAX_BYTES, Layout
from fedmq.wire.payloads import ClassPrototypes, Memory, Payload


class ReleasedInputs(Stored):
    """Shapes and dtypes of the model's inputs of one item, as :class:`fedmq.encoders.base.InputSpec` describes them."""

    image_shape: list[int]
    text_shape: list[int]
    image_dtype: str
    text_dtype: str
    mean: list[Finite] = Field(default_factory=list)
    std: list[Finite] = Field(default_factory=list)


class ReleaseConfig(Stored):
    """``model/config.json``: the configuration of a released model.

    It is enough to build the model without the training data.
    """

    backbone: dict[str, JsonValue]  # the scenario's backbone section
    objective: dict[str, JsonValue]  # the scenario's objective section
    protocol: str
    dim: int  # dimension of the embeddings
    layout_digest: Digest  # SHA-256 (hex) of the parameters' layout
    layout: list[str]  # names of its entries, in the order that ``model.safetensors`` does not keep
    model_digest: Digest  # digest of the parameters
    data_digest: Digest | None = None  # digest of the prepared data's content
    released_with: dict[str, Digest]  # digests of the payloads released with the model, by kind
    seed: int  # seed of the run, from which random frozen weights are drawn
    inputs: ReleasedInputs  # shapes and dtypes of the model's inputs
    # Names of the data's labels, in the order of a classifier's outputs.
    label_names: list[str] = Field(default_factory=list)
    # ``sentences`` if captions are encoded from text, ``bag`` for bags of words, ``vectors`` for features.
    texts: Literal["sentences", "bag", "vectors"]
    # Digest of the frozen encoder of each modality (``image``, ``text``), with its preprocessing; ``blocks`` is that of
    # encoders that contain the adapters. Empty for features. With ``partition.kind own`` it is the digest that the
    # sites stated, :func:`fedmq.encoders.base.stated_digest`.
    frozen: dict[str, str] = Field(default_factory=dict)
    # The shared model is not fully trained, so that retrieval needs a silo's personal model.
    personal_only: bool = False


#: Payloads that may be released with a model, by kind: name in messages, and constructor from the file's arrays.
BESIDE: Mapping[str, tuple[str, Callable[..., Payload]]] = {
    Memory.KIND: ("a memory", Memory),
    ClassPrototypes.KIND: ("a query bank", partial(ClassPrototypes, modality="both")),
}
_ALLOWED = "a file of the run's release"


def parameters(path: Path, names: Sequence[str]) -> tuple[Layout, npt.NDArray[Any]]:
    """The layout and the parameters [P] of a released model, as sent over the wire.

    ``names`` are those of the layout's entries, in the order that the file does not keep.

    Raises:
        InputError: the file is damaged, or has other tensors.
    """
    tensors = _arrays(path)
    strange = sorted(tensors.keys() ^ set(names))
    if strange:
        raise InputError(str(path), f"a difference in {strange[0]}", "the tensors that config.json lists")
    try:
        layout = Layout.of((name, tensors[name].shape, tensors[name].dtype.name) for name in names)
    except FieldError as error:
        raise InputError(str(path), str(error), _ALLOWED) from None
    raw = b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in names)
    return layout, np.frombuffer(raw, np.float32)


def beside(path: Path, kind: str) -> Payload:
    """Read a payload that was released with a model, of a kind in :data:`BESIDE`.

    Raises:
        InputError: the file is damaged or has other content.
    """
    what, make = BESIDE[kind]
    try:
        return make(**_arrays(path))
    except (TypeError, FieldError) as error:
        raise InputError(str(path), str(error), what) from None


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    from safetensors.numpy import load_file  # noqa: PLC0415 - most readers need no release

    check_regular(path, _ALLOWED, MAX_BYTES + (1 << 24))  # a safetensors file has a header in addition to the tensors
    try:
        return dict(load_file(path))
    except Exception as error:  # safetensors and the file system raise many types
        raise InputError(str(path), str(error), _ALLOWED) from None


def digests_of(record: RunSummary | ReleaseConfig) -> dict[str, str]:
    """Digests (hex) of the release and its data that a configuration or a summary records, by name in messages."""
    return digests_by_name(record.model_digest, record.data_digest, record.released_with)


def digests_by_name(model: str, data: str | None, with_it: Mapping[str, str]) -> dict[str, str]:
    """Digests (hex) of a release by name in messages; ``nothing`` if the data have none."""
    return {"a model": model, "data": data or "nothing", **with_it}


class OtherModelError(InputError):
    """The released files do not match the digests that the run recorded."""

    def __init__(self, place: Path, found: str, expected: str, what: str = "a model") -> None:
        super().__init__(str(place), f"{what} with digest {found}", f"the run's own, with digest {expected}")


def is_model(folder: Path) -> bool:
    """Whether a folder is that of a released model, and not a run's."""
    return (folder / "config.json").is_file() and not (folder / "scenario.yaml").is_file()


def model_config(folder: Path) -> ReleaseConfig:
    """The configuration in the folder of a released model.

    Raises:
        InputError: it is not such a folder, or its configuration is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(str(folder), "no config.json in it", "the folder of a released model, RUN/model")
    return read_json(path, ReleaseConfig, "the configuration of a released model")


def released_config(run: RunFolder) -> ReleaseConfig:
    """The configuration of a finished run's release.

    Raises:
        InputError: the run has no released model.
        OtherModelError: the release does not match the digests in the run's summary.
    """
    path = run.model / "config.json"
    if not path.is_file():
        raise InputError(str(run.root), "no released model in it", "the folder of a finished run")
    config = read_json(path, ReleaseConfig, "the configuration of a released model")
    # A release may be copied without its run; the summary, if present, reveals an exchanged release.
    if run.summary.is_file():
        released, expected = digests_of(config), digests_of(read_summary(run))
        for what in sorted(released.keys() | expected.keys()):
            if released.get(what, "nothing") != expected.get(what, "nothing"):
                raise OtherModelError(path, released.get(what, "nothing"), expected.get(what, "nothing"), what)
    return config


FORGOTTEN: Final = "forgotten.json"


class ForgottenSilo(Stored):
    """What a silo had contributed to the run in which it took part."""

    samples: Count  # number of its training items
    merges: Count  # number of its replies that were merged


class ForgottenRun(Stored):
    """One of the two runs, with and without the silos."""

    run: str  # id of the run
    model_digest: Digest
    versions_of: dict[str, str]  # versions and hardware with which it was made


class Forgotten(Stored):
    """``model/forgotten.json``: the model of a run from which silos were left out, and that of the run with them."""

    format: Literal[1]  # format of the file
    silos: dict[str, ForgottenSilo]  # the silos that were left out
    before: ForgottenRun  # the run with them
    after: ForgottenRun  # the run without them, whose model this is


def forget(before: RunFolder, after: RunFolder, ids: tuple[str, str], silos: Sequence[str]) -> Forgotten:
    """Write ``forgotten.json`` into the model folder of a run without some silos, and return it.

    ``before`` is the run with them, otherwise of the same scenario; ``ids`` are those of both runs.

    Raises:
        InputError: a run is not finished, a silo took part in the second one, or the file cannot be written.
        OtherModelError: a release does not match its run.
    """
    with_them, without = read_summary(before), read_summary(after)
    if present := sorted(set(silos) & without.per_silo.keys()):
        raise InputError(str(after.root), f"a run with {present[0]}", "a run without it")
    made = Forgotten(
        format=1,
        silos={
            name: ForgottenSilo(samples=silo.samples, merges=silo.participations)
            for name, silo in with_them.per_silo.items()
            if name in silos
        },
        before=_forgotten_run(before, with_them, ids[0]),
        after=_forgotten_run(after, without, ids[1]),
    )
    write_json(after.model / FORGOTTEN, made.plain())
    return made


def _forgotten_run(folder: RunFolder, summary: RunSummary, run: str) -> ForgottenRun:
    digest = released_config(folder).model_digest
    return ForgottenRun(run=run, model_digest=digest, versions_of=summary.versions_of)


SIGNATURE: Final = "signature.json"
_GALLERY = "gallery"
_DOMAIN = b"fedmq model folder 1\n"  # so that no other signature of the key can be mistaken for this one
_SIGNED_BY = "the signature of a model's folder, made by fedmq sign"
_MAX_FILES = 1000


class Signature(Stored):
    """``signature.json``."""

    format: Literal[1]  # format of the file
    signer: Annotated[str, Field(min_length=1, max_length=64)]
    key: Digest  # public Ed25519 key (hex)
    # SHA-256 (hex) of each file, by its path in the folder.
    files: Annotated[dict[str, Digest], Field(max_length=_MAX_FILES)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]  # Ed25519 signature (hex)


@dataclass(frozen=True)
class Verified:
    """What a verification found."""

    signer: str
    key: Ed25519PublicKey
    files: int
    differences: tuple[str, ...]


def sign_model(folder: Path, identity: Identity) -> Signature:
    """Sign a model's folder and write ``signature.json`` into it; an older signature is replaced.

    Raises:
        InputError: it is not a model's folder, or holds something other than regular files.
    """
    files = _digests(folder)
    for name in ("config.json", "model.safetensors"):
        if name not in files:
            raise InputError(str(folder), f"no {name} in it", "the folder of a released model")
    made = Signature(
        format=1,
        signer=identity.name,
        key=identity.key.public_key().public_bytes_raw().hex(),
        files=files,
        signature=identity.key.sign(_signed(identity.name, files)).hex(),
    )
    write_json(folder / SIGNATURE, made.plain())
    return made


def verify_model(folder: Path) -> Verified:
    """Compare a model's folder with its signature.

    The result says which key signed; whether that key is trusted is for the caller to decide.

    Raises:
        InputError: there is no signature, it is malformed or of other content, or the folder holds something other than
            regular files.
    """
    path = folder / SIGNATURE
    if not path.is_file():
        raise InputError(str(folder), f"no {SIGNATURE} in it", "the folder of a model signed by fedmq sign")
    made = read_json(path, Signature, _SIGNED_BY)
    for name in made.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise InputError(f"{path}: files", name, "paths within the folder")
    try:
        key = public_key_of(bytes.fromhex(made.key))
        key.verify(bytes.fromhex(made.signature), _signed(made.signer, made.files))
    except (InvalidSignature, ValueError):
        raise InputError(str(path), "a signature that does not fit its list of files", _SIGNED_BY) from None
    digests = _digests(folder)
    differences = tuple(
        f"{name}: {'missing' if now is None else 'not signed' if then is None else 'changed since it was signed'}"
        for name in sorted(made.files.keys() | digests.keys())
        if (now := digests.get(name)) != (then := made.files.get(name))
    )
    return Verified(made.signer, key, len(made.files), differences)


def _signed(signer: str, files: Mapping[str, str]) -> bytes:
    """The bytes under the signature."""
    return _DOMAIN + json.dumps({"signer": signer, "files": dict(files)}, sort_keys=True).encode()


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 (hex) of each file of a folder, by its path in it."""
    if not folder.is_dir():
        raise InputError(str(folder), "no such folder", "the folder of a released model")
    digests: dict[str, str] = {}
    for here, folders, names in os.walk(folder):
        if Path(here) == folder:
            folders[:] = [name for name in folders if name != _GALLERY]
            names = [name for name in names if name != SIGNATURE]  # noqa: PLW2901
        for name in (*names, *(each for each in folders if (Path(here) / each).is_symlink())):
            path = Path(here) / name
            if path.is_symlink():
                raise InputError(str(path), "a link", "regular files only")
            if len(digests) == _MAX_FILES:
                raise InputError(str(folder), f"more than {_MAX_FILES} files", "the folder of a released model")
            with open_regular(path, "a file of a released model") as file:
                digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return dict(sorted(digests.items()))


_TOWERS = """\
Each tower maps the frozen encoder's vector `x` (float32) of an image or a caption to an embedding:

    for each adapter of the tower:  x = x + {adapter}
    z = head.1(relu(head.0(x)))
    embedding = normalize({sum})

The tensors are `visual.adapters.*` and `visual.head.*` for images, `text.adapters.*` and `text.head.*` for captions;
each layer is `weight @ x + bias`, and of a low-rank adapter `weight @ x`. With `adapter_site: blocks` {blocks} instead.
Embeddings have {dim} numbers and unit length; cosine similarity ranks them."""
_NETWORK = """\
The network of the base loss `{base}` maps the frozen encoders' vectors to {dim} numbers, of which {ranked}. Its layers
are listed in `config.json` (`layout`); `fedmq.models.hash_networks` computes them."""
_CARD = Path(__file__).parent / "report" / "templates" / "model_card.md.template"


def model_card(config: ReleaseConfig, summary: RunSummary, label: str, split: str) -> str:
    """The text of the card (Markdown, with the front matter that model hubs read)."""
    summary = with_own_figures(summary)
    gallery = gallery_of(summary)
    metrics = meaningful(summary.metrics, gallery)
    remarks = [] if gallery is None else gallery.remarks(summary.metrics)
    samples = sum(silo.samples for silo in summary.per_silo.values())
    contributed = sum(bool(silo.participations) for silo in summary.per_silo.values())
    name, weights = config.backbone.get("name"), config.backbone.get("pretrained")
    made = ", ".join(f"{what} {version}" for what, version in summary.versions_of.items())
    return _CARD.read_text(encoding="utf-8").format(
        scenario=summary.scenario,
        label=label,
        silos=len(summary.per_silo),
        participating=contributed,
        versions=summary.versions,
        samples=f"{samples:,}",
        backbone=f"{name}, weights {weights}" if weights else name,
        data=config.data_digest,
        model=config.model_digest,
        made=made,
        items=f"the held-out {split} split" + ("" if gallery is None else f" ({gallery.items})"),
        remarks="".join(f"\n\n{each[0].upper()}{each[1:]}." for each in remarks),
        split_name=split,
        measured="\n".join(_measured(metrics)),
        results=_results(metrics),
        forward=_forward(config),
        onnx=onnx_contents(config),
    )


def onnx_contents(config: ReleaseConfig) -> str:
    """What the files of ``fedmq export --onnx`` hold of a model, and what their inputs are, as two sentences."""
    if config.backbone.get("adapter_site") == "blocks":
        return (
            "image.onnx and text.onnx of `fedmq export --onnx` hold the whole model, the frozen encoder included. "
            "Their inputs are pixels and token ids."
        )
    name = config.backbone.get("name")
    if name == "features":
        made = (
            "Their inputs are feature vectors like those of the training data; fedmq has no program that computes them."
        )
    else:
        made = f"Their inputs are the vectors of the frozen encoder {name}: it must run before them."
    return f"image.onnx and text.onnx of `fedmq export --onnx` hold the trained part only. {made}"


def _measured(metrics: Mapping[str, float]) -> list[str]:
    """Lines of the front matter, one per metric."""
    lines = []
    for metric in shown(metrics):
        about = {"type": metric.name, "name": metric.title, "value": round(metrics[metric.name], 6)}
        lines.append(f"          - {json.dumps(about)}")
    return lines


def _results(metrics: Mapping[str, float]) -> str:
    rows = [f"| {metric.title} | {metrics[metric.name]:.4f} |" for metric in shown(metrics)]
    return "\n".join(["| metric | value |", "|---|---|", *rows])


def _forward(config: ReleaseConfig) -> str:
    objective, backbone = config.objective, config.backbone
    network = network_of(Objective.model_validate(objective))
    if network is not None:
        ranked = "the signs are the hash code" if objective.get("bits") else "cosine similarity ranks them"
        return _NETWORK.format(base=objective.get("base"), dim=config.dim, ranked=ranked)
    kind, scale = backbone.get("adapter"), backbone.get("adapter_scale")
    low_rank = f"the query and value weights of the frozen encoder's blocks change by `{scale} * up @ down`"
    adapters = {"mma": f"{scale} * up(relu(shared(relu(down(x)))))", "lora": f"{scale} * up(down(x))"}
    return _TOWERS.format(
        adapter=adapters.get(str(kind), "up(gelu(down(x)))"),
        blocks=low_rank if kind == "lora" else "the adapters follow the blocks of the frozen encoder",
        sum="x + z" if backbone.get("head") == "residual" else "z",
        dim=config.dim,
    )
