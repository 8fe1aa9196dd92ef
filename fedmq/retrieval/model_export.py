"""Export a released model for other programs: to ONNX, and as a folder that can be uploaded to the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedmq.config.sections import Modality
from fedmq.encoders.base import MODALITIES, InputSpec
from fedmq.errors import InputError, RunError
from fedmq.models.two_tower import TwoTower
from fedmq.packages import package
from fedmq.retrieval.encoded_gallery import ONNX_FILE, QueryFolders, query_folders, seal, session
from fedmq.retrieval.released_model import ModelFolder, described
from fedmq.runs.release import BESIDE
from fedmq.storage.cache import build_once
from fedmq.storage.regular_files import check_regular
from fedmq.storage.run_folder import writing

#: Maximum difference between an exported model's outputs and the model's own.
PARITY: Final = 1e-5
_OPSET: Final = 17
_CHECKED = (1, 5)  # batch sizes with which an exported model is compared
_CARD = "README.md"


class _Tower(nn.Module):
    """One tower from its inputs to embeddings of unit length, or to the outputs whose signs are a hash code."""

    def __init__(self, model: TwoTower, modality: Modality) -> None:
        super().__init__()
        self.model, self.modality = model, modality

    def forward(self, x: Tensor) -> Tensor:
        output = self.model.image(x) if self.modality == "image" else self.model.caption(x)
        return output if self.model.binary else normalize(output, dim=1)


@dataclass(frozen=True)
class OnnxFile:
    """An exported tower."""

    path: Path  # path of the file
    difference: float  # maximum difference between its outputs and the model's own, over random inputs


def export_onnx(files: ModelFolder, folder: Path) -> tuple[OnnxFile, ...]:
    """Write ``image.onnx`` and ``text.onnx``, and compare them with the model in onnxruntime; returns the two files.

    A tower's input ``x`` is what the frozen encoder gives, float32 [batch, d]; with adapters in the blocks it is uint8
    pixels [batch, 3, S, S] or int32 tokens [batch, 77], and the file includes the frozen encoder. The output
    ``embedding`` is float32 [batch, dim] of unit length; of a hash network it is ``code``, whose signs are the bits.

    Raises:
        InputError: the folder exists, the model cannot stand alone or has a layer that ONNX lacks, or a package is
            missing.
        RunError: the exported model computes something else, or the folder cannot be written.
    """
    _check_new(folder, "--onnx")
    onnx, _ = (package(name, "onnx", "fedmq export --onnx") for name in ("onnx", "onnxruntime"))
    inputs, label_names = described(files)
    model = files.build(inputs, label_names)
    differences: dict[str, float] = {}

    def fill(made: Path) -> None:
        for modality in MODALITIES:
            path = made / f"{modality}.onnx"
            tower = _Tower(model, modality).eval()
            _write_tower(tower, inputs, path)
            _describe(onnx, path, files, modality)
            differences[modality] = _difference(tower, path, inputs)

    _create(folder, fill)
    return tuple(OnnxFile(folder / f"{modality}.onnx", differences[modality]) for modality in MODALITIES)


def _check_new(folder: Path, option: str) -> None:
    if folder.exists():
        raise InputError(f"{option} {folder}", "a folder that exists", "a new one")


def _create(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create a folder with its contents, complete or not at all."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            fill(made)
            made.chmod(0o755)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _examples(inputs: InputSpec, modality: Modality, count: int) -> Tensor:
    """Random inputs of a tower, [count, ...]."""
    shape = inputs.image_shape if modality == "image" else inputs.text_shape
    dtype = inputs.image_dtype if modality == "image" else inputs.text_dtype
    generator = np.random.default_rng(count)
    if dtype == "float32":
        return torch.from_numpy(generator.normal(size=(count, *shape)).astype(np.float32))
    # Token ids: any small ones; open_clip pools at the largest.
    return torch.from_numpy(generator.integers(1, 256, (count, *shape)).astype(dtype))


def export_query(files: ModelFolder, modality: Modality) -> QueryFolders | None:
    """Write the ONNX files with which a query is encoded without torch, unless they are in the cache.

    Returns:
        Their folders; None if torch has to encode the query: the model has another encoder than ``lite`` or a layer
        that ONNX lacks, cannot stand alone, its exported tower computes something else, a package is missing, or the
        cache cannot be written.
    """
    folders = query_folders(files.config, modality)
    if folders is None or folders.exist:
        return folders
    from fedmq.encoders import lite, lite_inputs  # noqa: PLC0415 - only this backbone needs it

    def fill_encoder(made: Path) -> None:
        encoder = lite.ImageEncoder() if modality == "image" else lite.TextEncoder()
        item = np.zeros((lite_inputs.EDGE, lite_inputs.EDGE, 3), np.uint8) if modality == "image" else "a text"
        inputs = {name: torch.from_numpy(array) for name, array in lite_inputs.one_input(item).items()}
        axes = {name: {1: "tokens"} for name in inputs if name != "x"}
        _write_onnx(encoder, inputs, "embedding", axes, made / ONNX_FILE)
        seal(made)

    def fill_tower(made: Path) -> None:
        inputs, label_names = described(files)
        tower = _Tower(replace(files, device="cpu").build(inputs, label_names, (modality,)), modality).eval()
        _write_tower(tower, inputs, made / ONNX_FILE)
        _difference(tower, made / ONNX_FILE, inputs)
        seal(made)

    try:
        for folder, fill in ((folders.encoder, fill_encoder), (folders.tower, fill_tower)):
            build_once(folder, fill)
    except (InputError, RunError):
        return None
    return folders


def _write_tower(tower: _Tower, inputs: InputSpec, path: Path) -> None:
    output = "code" if tower.model.binary else "embedding"
    axes = {"x": {0: "batch"}, output: {0: "batch"}}
    _write_onnx(tower, {"x": _examples(inputs, tower.modality, 2)}, output, axes, path)


def _write_onnx(
    module: nn.Module, examples: Mapping[str, Tensor], output: str, axes: Mapping[str, Mapping[int, str]], path: Path
) -> None:
    """Write a module to an ONNX file; ``axes`` names the axes of inputs and output that have any length."""
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # ONNX lacks the fused attention of inference
        with torch.inference_mode(), warnings.catch_warnings():
            # Of constants in the traced graph, and of the newer exporter, which needs a further package. Whether the
            # file computes the same is checked afterwards.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                tuple(examples.values()),
                str(path),
                input_names=list(examples),
                output_names=[output],
                dynamic_axes=axes,
                opset_version=_OPSET,
                dynamo=False,
            )
    except Exception as error:  # the exporter raises many types for layers that it does not know
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(f"--onnx: {path.name}", reason[:200], "layers that ONNX supports") from None
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _describe(onnx: Any, path: Path, files: ModelFolder, modality: Modality) -> None:
    """Record in an exported tower which model it is, and which frozen encoder makes its inputs."""
    loaded = onnx.load(str(path))
    config = files.config
    inside = config.backbone.get("adapter_site") == "blocks"
    facts = {
        "fedmq.model_digest": config.model_digest,
        "fedmq.backbone": str(config.backbone.get("name")),
        "fedmq.input": "pixels or tokens" if inside else "vectors of the frozen encoder",
        "fedmq.frozen_digest": config.frozen.get("blocks" if inside else modality, ""),
    }
    onnx.helper.set_model_props(loaded, facts)
    onnx.checker.check_model(loaded)
    onnx.save(loaded, str(path))


def _difference(tower: _Tower, path: Path, inputs: InputSpec) -> float:
    """The largest difference, at most :data:`PARITY`, between a tower's outputs and those of its exported file."""
    opened, worst = session(path), 0.0
    for count in _CHECKED:
        x = _examples(inputs, tower.modality, count)
        with torch.inference_mode():
            expected: npt.NDArray[np.float32] = tower(x).float().numpy()
        (computed,) = opened.run(None, {"x": x.numpy()})
        worst = max(worst, float(np.abs(computed - expected).max()))
    if not worst <= PARITY:
        raise RunError(f"{path.name}: its outputs differ by {worst:.2g} from the model's, more than {PARITY:g}")
    return worst


# ---------------------------------------------------------------------------------------------------------- hub folder
def export_hub(files: ModelFolder, folder: Path) -> tuple[str, ...]:
    """Write a folder that can be uploaded to the Hugging Face Hub, and that :func:`fedmq.load` opens.

    It holds the model card, the weights and the configuration, and nothing else: no gallery, and no path of this
    machine's weights. The parameters are checked against their digests.

    Returns:
        Names of its files.

    Raises:
        InputError: the folder exists, or the model is damaged or cannot stand alone.
        RunError: the folder cannot be written.
    """
    _check_new(folder, "--hub")
    files.build(*described(files))
    beside = [f"{kind}.safetensors" for kind in BESIDE if kind in files.config.released_with]
    _create(folder, partial(_fill_hub, files=files, names=[_CARD, "model.safetensors", *beside]))
    return tuple(sorted(path.name for path in folder.iterdir()))


def _fill_hub(made: Path, files: ModelFolder, names: list[str]) -> None:
    for name in names:
        check_regular(files.folder / name, "a file of the released model")
        shutil.copyfile(files.folder / name, made / name)
    backbone = dict(files.config.backbone)
    pretrained = backbone.get("pretrained")
    if isinstance(pretrained, str) and ("/" in pretrained or "\\" in pretrained):
        backbone["pretrained"] = Path(pretrained).name
    if backbone.get("text_encoder") is not None:
        backbone["text_encoder"] = Path(str(backbone["text_encoder"])).name
    plain = files.config.model_copy(update={"backbone": backbone}).plain()
    (made / "config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
