"""Load and validate the weights of open_clip models, and cache them as one safetensors file per tower."""

import difflib
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import open_clip
import safetensors
import safetensors.torch
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.convert import convert_state_dict
from open_clip.model import CLIP, CustomTextCLIP, convert_to_custom_text_state_dict
from torch import Tensor, nn

from fedmq.config.scenario import Backbone
from fedmq.config.sections import Modality
from fedmq.encoders.base import MODALITIES
from fedmq.encoders.foreign_weights import config_in, state_of
from fedmq.errors import InputError, RunError
from fedmq.seeds import derive
from fedmq.storage import quarantine
from fedmq.storage.cache import build_once, file_digest, key_of
from fedmq.storage.locks import locked

# In checkpoints, but not part of either tower.
SCALES = ("logit_scale", "logit_bias")
# Only in the files that OpenAI published.
OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")
# In old checkpoints; the model computes or does not need them.
IGNORED = (*OPENAI_MARKS, "attn_mask", "text.attn_mask")


def config_of(name: str) -> dict[str, Any]:
    """The architecture of an open_clip model, by its name in ``open_clip.list_models()`` or a .json configuration.

    Raises:
        InputError: the name is unknown (similar names are listed), the file is unreadable, or this kind of model is not
            supported.
    """
    if name.endswith(".json"):
        files, allowed = [Path(name)], "a configuration of an open_clip model"
        config: Mapping[str, Any] = quarantine.read(config_in, files[0], place=name, allowed=allowed, files=files)
    else:
        known = open_clip.list_models()
        if name not in known:
            by_case = {model.lower(): model for model in known}
            near = [by_case[found] for found in difflib.get_close_matches(name.lower(), by_case, 5, 0.5)]
            hint = f", close: {', '.join(near)}" if near else ""
            raise InputError(
                "backbone.name",
                name,
                f"lite, features, timm:NAME, matconvnet, or a name of open_clip.list_models(){hint}",
            )
        config = open_clip.get_model_config(name)
    if "multimodal_cfg" in config:
        raise InputError("backbone.name", name, "a model with two towers only; CoCa has a decoder over both")
    if "hf_model_name" in config["text_cfg"]:
        raise InputError(
            "backbone.name", name, "a model whose text tower is open_clip's own; this one needs a model hub"
        )
    # Weights come from backbone.pretrained only; do not let timm download any.
    config["vision_cfg"].pop("timm_model_pretrained", None)
    return dict(config)


def _built(config: Mapping[str, Any]) -> nn.Module:
    arguments = deepcopy(dict(config))
    kind = CustomTextCLIP if arguments.pop("custom_text", False) else CLIP
    model: nn.Module = kind(**arguments)
    return model.eval().requires_grad_(False)


def _construct(name: str, config: Mapping[str, Any]) -> nn.Module:
    """Construct the complete model on torch's current default device."""
    try:
        return _built(config)
    except Exception as error:  # open_clip, timm and torch raise many types for a configuration that they cannot build
        raise _not_built(name, error) from None


def _not_built(name: str, error: Exception) -> InputError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return InputError(f"backbone.name: {name}", reason, "a configuration of an open_clip model")


def skeleton(name: str, config: Mapping[str, Any]) -> nn.Module:
    """Construct the model on the meta device, without memory for its weights, where possible."""
    try:
        with torch.device("meta"):
            return _built(config)
    except Exception as error:
        # Some timm models use the values of their weights during construction. Others could take much memory before an
        # invalid configuration is found.
        if "timm_model_name" not in config["vision_cfg"]:
            raise _not_built(name, error) from None
        return _construct(name, config)


# --- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Frozen weights in the cache."""

    folder: Path  # folder with ``image.safetensors`` and ``text.safetensors``
    name: str  # name of the model
    config: Mapping[str, Any]  # architecture of the model
    mean: tuple[float, ...]  # mean per channel of pixels scaled to [0, 1]
    std: tuple[float, ...]  # standard deviation per channel of pixels scaled to [0, 1]


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of a model's images."""

    mean: tuple[float, ...] = OPENAI_DATASET_MEAN  # mean per channel of pixels scaled to [0, 1]
    std: tuple[float, ...] = OPENAI_DATASET_STD  # standard deviation per channel of pixels scaled to [0, 1]
    interpolation: str = "bicubic"  # bicubic or bilinear
    # ``shortest`` (resize the shorter side, then centre-crop) or ``squash`` (resize both sides).
    resize_mode: str = "shortest"
    # Mean and std if neither the tag of the weights nor open_clip's default implies them; part of cache keys.
    unnamed: tuple[float, ...] = ()


def _tags_of(name: str) -> list[str]:
    return [] if name.endswith(".json") else list(open_clip.list_pretrained_tags_by_model(name))


def preprocessing(backbone: Backbone) -> Preprocessing:
    """Preprocessing for a backbone's weights: the tag's; for a file, the values that all tags of the model share.

    Values that differ between tags, and all values for random weights, are open_clip's defaults (OpenAI's values).

    Raises:
        InputError: the model, tag or file is unknown, or its resizing is not supported.
    """
    kind, what = _source_of(backbone)
    tags = {"tag": [what], "file": _tags_of(backbone.name), "random": []}[kind]
    trained = [open_clip.get_pretrained_cfg(backbone.name, tag) for tag in tags]
    usual = Preprocessing()

    def agreed(key: str) -> Any:
        default = getattr(usual, key)
        values = [type(default)(config.get(key) or default) for config in trained]
        return values[0] if values and values.count(values[0]) == len(values) else default

    shared = Preprocessing(*(agreed(key) for key in ("mean", "std", "interpolation", "resize_mode")))
    if shared.resize_mode not in ("shortest", "squash") or shared.interpolation not in ("bicubic", "bilinear"):
        found = f"{what or backbone.name}, whose images are scaled by {shared.resize_mode}, {shared.interpolation}"
        raise InputError("backbone.pretrained", found, "weights for shortest or squash, bicubic or bilinear")
    implied = kind == "tag" or (shared.mean, shared.std) == (usual.mean, usual.std)
    return shared if implied else replace(shared, unnamed=(*shared.mean, *shared.std))


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Load the state dict of a local file, in the quarantine.

    Raises:
        InputError: the file is unreadable or not a state dict.
    """
    allowed = (
        "a state dict, .safetensors or .pt of tensors alone; of a TorchScript archive save "
        "torch.jit.load(FILE, map_location='cpu').state_dict() once"
    )
    place = f"backbone.pretrained: {path}"
    read = quarantine.read(state_of, path, place=place, allowed=allowed, files=[path], libraries=["torch"])
    return {name: torch.as_tensor(value) for name, value in read.items()}


def fitting(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The parameters that a model needs, out of a file's.

    Raises:
        InputError: a parameter is missing or has the wrong shape.
    """
    for name, value in wanted.items():
        if name not in state or state[name].shape != value.shape:
            found = f"shape {list(state[name].shape)}" if name in state else "no such parameter"
            raise InputError(f"backbone.pretrained: {path}: {name}", found, f"shape {list(value.shape)}")
    return {name: state[name] for name in wanted}


def _checked_state(backbone: Backbone, model: nn.Module, path: Path) -> dict[str, Tensor]:
    """A local file's weights; all names and shapes must match those of the model, which may be a skeleton."""
    state = read_checkpoint(path)
    if not config_of(backbone.name).get("quick_gelu", False) and state.keys() >= set(OPENAI_MARKS):
        other = f"{backbone.name}-quickgelu"
        if other not in open_clip.list_models():
            other = 'a model with "quick_gelu": true'
        allowed = f"{other} for {path}: OpenAI's weights were trained with its activation"
        raise InputError("backbone.name", backbone.name, allowed)
    state = convert_state_dict(model, state)
    if "positional_embedding" in state and not hasattr(model, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    state = {name: value for name, value in state.items() if name not in (*SCALES, *IGNORED)}
    wanted = {name: value for name, value in model.state_dict().items() if name not in SCALES}
    if unknown := sorted(set(state) - set(wanted)):
        place = f"backbone.pretrained: {path}: {unknown[0]}"
        raise InputError(place, "a parameter the model does not have", "weights of this model")
    return fitting(state, wanted, path)


def source_of(name: str, wanted: str | None, tags: Sequence[str]) -> tuple[str, str]:
    """Source of a model's weights: ``("random", "")``, ``("tag", tag)`` or ``("file", path)``.

    Raises:
        InputError: ``wanted`` is neither a tag of the model nor a file.
    """
    if wanted is None:
        return "random", ""
    if wanted in tags:
        return "tag", wanted
    if Path(wanted).is_file():
        return "file", wanted
    raise InputError("backbone.pretrained", wanted, f"a file, or a tag of {name}: {', '.join(tags) or 'it has none'}")


def _source_of(backbone: Backbone) -> tuple[str, str]:
    """As :func:`source_of`, which also checks that the model has the activation with which a tag was trained."""
    kind, what = source_of(backbone.name, backbone.pretrained, _tags_of(backbone.name))
    if kind == "tag":
        trained = bool(open_clip.get_pretrained_cfg(backbone.name, what).get("quick_gelu", False))
        if trained != bool(config_of(backbone.name).get("quick_gelu", False)):
            # open_clip only warns, and the features would be wrong.
            other = f"{backbone.name}-quickgelu" if trained else backbone.name.removesuffix("-quickgelu")
            allowed = f"{other} for the weights {what}, which were trained with its activation"
            raise InputError("backbone.name", backbone.name, allowed)
    return kind, what


def digest_of(path: Path, cache: Path) -> str:
    """SHA-256 (hex) of a file, cached by path, size and modification time, so that not every silo hashes it."""
    about = path.stat()
    kept = cache / "digests" / key_of(str(path.resolve()), about.st_size, about.st_mtime_ns)
    with locked(kept.with_suffix(".lock")):
        known = kept.read_bytes().decode("ascii", "replace") if kept.is_file() else ""
        if not re.fullmatch("[0-9a-f]{64}", known):
            unfinished, known = kept.with_suffix(".unfinished"), file_digest(path)
            unfinished.write_text(known, encoding="ascii")
            unfinished.replace(kept)
    return known


def weights_digest(backbone: Backbone, seed: int, cache: Path) -> str:
    """SHA-256 (hex) of the source of the frozen weights, used as a cache key.

    Raises:
        InputError: the model, tag or file is unknown.
    """
    config = config_of(backbone.name)
    kind, what = _source_of(backbone)
    if kind == "random":
        what = str(seed)
    elif kind == "file":
        what = digest_of(Path(what), cache)
    # For a .json model the configuration identifies it. Random weights also depend on its name, which seeds them.
    name = "" if kind == "file" and backbone.name.endswith(".json") else backbone.name
    return key_of("weights", open_clip.__version__, name, config, kind, what)


def _full_model(backbone: Backbone, config: Mapping[str, Any], seed: int) -> nn.Module:
    """The complete model on the CPU, with its weights."""
    kind, what = _source_of(backbone)
    if kind == "tag":
        try:
            fetched: nn.Module = open_clip.create_model(backbone.name, pretrained=what, weights_only=True)
        except (RuntimeError, OSError, ValueError) as error:
            instead = "to use a local file: --set backbone.pretrained=FILE"
            why = f"backbone.pretrained: {what} of {backbone.name} could not be fetched ({error}); {instead}"
            raise RunError(why) from error
        return fetched.eval().requires_grad_(False)
    # Before the model is constructed, which may be much larger than the file.
    state = _checked_state(backbone, skeleton(backbone.name, config), Path(what)) if kind == "file" else None
    # open_clip initialises from the global generator, whose state fork_rng restores.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "backbone", backbone.name))
        model = _construct(backbone.name, config)
    if state is not None:
        model.load_state_dict(state, strict=False)
    return model


def _modality_of(name: str) -> Modality:
    return "image" if name.startswith("visual.") else "text"


def _tensors(model: nn.Module) -> dict[Modality, dict[str, Tensor]]:
    """All parameters and buffers of each tower, including non-persistent buffers (masks, rotary tables)."""
    towers: dict[Modality, dict[str, Tensor]] = {modality: {} for modality in MODALITIES}
    seen: set[int] = set()
    parts = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, value in parts:
        if name not in SCALES:
            # Safetensors rejects tensors that share memory, as tied weights do.
            tied = value.data_ptr() in seen
            seen.add(value.data_ptr())
            towers[_modality_of(name)][name] = (value.detach().clone() if tied else value.detach()).contiguous()
    return towers


def image_size(name: str, config: Mapping[str, Any]) -> int:
    """Edge length of a model's square input images [pixels]."""
    size = config["vision_cfg"].get("image_size", 224)
    edges = set(size) if isinstance(size, list | tuple) else {size}
    if len(edges) != 1:
        raise InputError("backbone.name", name, f"a model of square images, not {size}")
    return int(edges.pop())


def context_length(config: Mapping[str, Any]) -> int:
    """Number of tokens of one caption."""
    return int(config["text_cfg"].get("context_length", 77))


def weights(backbone: Backbone, seed: int, cache: Path) -> Weights:
    """Get the frozen weights from the cache, converting them first if necessary.

    ``pretrained`` is a tag, a local file, or null for random weights, which the scenario's seed draws.

    Raises:
        InputError: the model, tag or file is unknown, or the file does not match the model.
        RunError: a tag's weights could not be downloaded, or the cache cannot be written.
    """
    config, how = config_of(backbone.name), preprocessing(backbone)

    def fill(folder: Path) -> None:
        for modality, tensors in _tensors(_full_model(backbone, config, seed)).items():
            safetensors.torch.save_file(tensors, folder / f"{modality}.safetensors")

    return Weights(
        folder=build_once(cache / "weights" / weights_digest(backbone, seed, cache), fill),
        name=backbone.name,
        config=config,
        mean=how.mean,
        std=how.std,
    )
