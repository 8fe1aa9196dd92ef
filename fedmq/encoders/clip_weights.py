"""The weights of open_clip models: read and checked once, kept in the cache as one safetensors file per tower."""

import difflib
import functools
import json
import zipfile
from collections.abc import Mapping
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

from fedmq.config.parts import Modality
from fedmq.config.scenario import Backbone
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError, RunError
from fedmq.seeds import derive
from fedmq.storage.cache import build_once, file_digest, key_of
from fedmq.storage.locks import locked

CONFIG_KEYS = ("embed_dim", "vision_cfg", "text_cfg")
# In checkpoints but no part of either tower.
SCALES = ("logit_scale", "logit_bias")
# In the files that OpenAI published, and in no others.
OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")
# In old checkpoints; computed, or of no use to the model.
PASSED_OVER = (*OPENAI_MARKS, "attn_mask", "text.attn_mask")


def config_of(name: str) -> dict[str, Any]:
    """The architecture of an open_clip model.

    Args:
        name: of ``open_clip.list_models()``, or the path of a .json file of the same form.

    Raises:
        InputError: unknown name (close ones are listed), unreadable file, or a kind of model that cannot be used here.
    """
    if name.endswith(".json"):
        try:
            config = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"backbone.name: {name}", str(error), "a readable .json file of a model") from None
        if not isinstance(config, dict) or not all(key in config for key in CONFIG_KEYS):
            raise InputError(f"backbone.name: {name}", "no model", f"a JSON object with {', '.join(CONFIG_KEYS)}")
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
    # Weights come from backbone.pretrained alone: nothing else is ever fetched.
    config["vision_cfg"].pop("timm_model_pretrained", None)
    return dict(config)


def _construct(name: str, config: Mapping[str, Any]) -> nn.Module:
    """The whole model, on torch's current default device.

    Raises:
        InputError: the configuration does not make a model.
    """
    arguments = deepcopy(dict(config))
    kind = CustomTextCLIP if arguments.pop("custom_text", False) else CLIP
    try:
        model: nn.Module = kind(**arguments)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"backbone.name: {name}", str(error), "a configuration of an open_clip model") from None
    return model.eval().requires_grad_(False)


def skeleton(name: str, config: Mapping[str, Any]) -> nn.Module:
    """The model without memory for its weights."""
    try:
        with torch.device("meta"):
            return _construct(name, config)
    except (RuntimeError, NotImplementedError):
        # Some timm models compute with their own weights while they are built.
        return _construct(name, config)


# --- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Frozen weights in the cache.

    Args:
        folder: holds ``image.safetensors`` and ``text.safetensors``.
        name: of the model.
        config: its architecture.
        mean: per channel, of pixels scaled to [0, 1].
        std: likewise.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Preprocessing:
    """How a model's pictures are made.

    Args:
        mean: per channel, of pixels scaled to [0, 1].
        std: likewise.
        interpolation: bicubic or bilinear.
        resize_mode: ``shortest``, whose middle is cut out, or ``squash``: the whole picture as a square.
        unnamed: mean and std where neither the name of the weights nor open_clip's default says them.
    """

    mean: tuple[float, ...] = OPENAI_DATASET_MEAN
    std: tuple[float, ...] = OPENAI_DATASET_STD
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    unnamed: tuple[float, ...] = ()


def _tags_of(name: str) -> list[str]:
    return [] if name.endswith(".json") else list(open_clip.list_pretrained_tags_by_model(name))


def preprocessing(backbone: Backbone) -> Preprocessing:
    """How pictures are made for these weights: as the tag says; for a file, as all tags of its architecture agree.

    What they do not agree on, and everything for random weights, is open_clip's default: OpenAI's values.

    Raises:
        InputError: unknown model, tag or file, or a way to scale pictures that cannot be had here.
    """
    kind, what = _source_of(backbone)
    tags = {"tag": [what], "file": _tags_of(backbone.name), "random": []}[kind]
    trained = [open_clip.get_pretrained_cfg(backbone.name, tag) for tag in tags]
    usual = Preprocessing()

    def agreed(key: str) -> Any:
        default = getattr(usual, key)
        found = [type(default)(one.get(key) or default) for one in trained]
        return found[0] if found and found.count(found[0]) == len(found) else default

    made = Preprocessing(*(agreed(key) for key in ("mean", "std", "interpolation", "resize_mode")))
    if made.resize_mode not in ("shortest", "squash") or made.interpolation not in ("bicubic", "bilinear"):
        found = f"{what or backbone.name}, whose pictures are scaled by {made.resize_mode}, {made.interpolation}"
        raise InputError("backbone.pretrained", found, "weights for shortest or squash, bicubic or bilinear")
    own = kind == "tag" or (made.mean, made.std) == (usual.mean, usual.std)
    return made if own else replace(made, unnamed=(*made.mean, *made.std))


def _is_torchscript(path: Path) -> bool:
    """Whether a file is a program with weights, as OpenAI published CLIP, and no state dict."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The state dict of a local file, never unpickled beyond tensors.

    Raises:
        InputError: unreadable, or no state dict.
    """
    place = f"backbone.pretrained: {path}"
    try:
        if path.suffix == ".safetensors":
            state: Any = safetensors.torch.load_file(path)
        elif _is_torchscript(path):
            once = "torch.save(torch.jit.load(FILE, map_location='cpu').state_dict(), OTHER)"
            allowed = f"a state dict, which {once} makes of it once; for OpenAI's CLIP also the tag openai"
            raise InputError(place, "a TorchScript archive", allowed)
        else:
            # Mapped where the format allows it: a model and its checkpoint need not be in memory together.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except InputError:
        raise
    except Exception as error:  # torch.load raises whatever its readers raise on a corrupt file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if "weights_only" in str(error):
            reason = "something other than tensors"  # torch advises to switch the check off
        raise InputError(place, reason, "a state dict (.safetensors, or .pt readable with weights_only)") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor | int) for v in state.values()):
        raise InputError(f"backbone.pretrained: {path}", type(state).__name__, "a mapping of names to tensors")
    return {str(key).removeprefix("module."): value for key, value in state.items()}


def _names_in(path: Path) -> frozenset[str]:
    """Names of a local file's parameters; read again only when the file was changed.

    Raises:
        InputError: unreadable, or no state dict.
    """
    about = path.stat()
    return _names_read(path, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _names_read(path: Path, _size: int, _changed: int) -> frozenset[str]:
    if path.suffix != ".safetensors":
        return frozenset(read_checkpoint(path))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return frozenset(name.removeprefix("module.") for name in file.keys())  # noqa: SIM118 - not a mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"backbone.pretrained: {path}", str(error), "a readable .safetensors file") from None


def _load_checkpoint(model: nn.Module, path: Path) -> None:
    """Put a local file's weights into the model; every name and shape must fit.

    Raises:
        InputError: a parameter is missing, unknown or of another shape.
    """
    state = convert_state_dict(model, read_checkpoint(path))
    if "positional_embedding" in state and not hasattr(model, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    state = {name: value for name, value in state.items() if name not in (*SCALES, *PASSED_OVER)}
    wanted = {name: value for name, value in model.state_dict().items() if name not in SCALES}
    place = f"backbone.pretrained: {path}"
    for name, value in wanted.items():
        if name not in state:
            raise InputError(f"{place}: {name}", "no such parameter", f"shape {list(value.shape)}")
        if state[name].shape != value.shape:
            raise InputError(f"{place}: {name}", f"shape {list(state[name].shape)}", f"shape {list(value.shape)}")
    if unknown := sorted(set(state) - set(wanted)):
        raise InputError(f"{place}: {unknown[0]}", "a parameter the model does not have", "weights of this very model")
    model.load_state_dict(state, strict=False)


def _source_of(backbone: Backbone) -> tuple[str, str]:
    """Where weights come from: ``("random", "")``, ``("tag", tag)`` or ``("file", path)``.

    Raises:
        InputError: neither a tag of the model nor a readable file, or trained with another activation.
    """
    wanted = backbone.pretrained
    if wanted is None:
        return "random", ""
    tags, quick = _tags_of(backbone.name), bool(config_of(backbone.name).get("quick_gelu", False))
    if wanted in tags:
        trained = bool(open_clip.get_pretrained_cfg(backbone.name, wanted).get("quick_gelu", False))
        if trained != quick:
            # open_clip only warns; the features would be wrong without a sign of it.
            other = f"{backbone.name}-quickgelu" if trained else backbone.name.removesuffix("-quickgelu")
            raise InputError(
                "backbone.name", backbone.name, f"{other} for the weights {wanted}, which had its activation"
            )
        return "tag", wanted
    if Path(wanted).is_file():
        # Looked for here and not when the weights are read: rows that were made with them may be in the cache already.
        if not quick and _names_in(Path(wanted)).issuperset(OPENAI_MARKS):
            other = f"{backbone.name}-quickgelu"
            if other not in open_clip.list_models():
                other = 'a model with "quick_gelu": true'
            allowed = f"{other} for {wanted}: OpenAI's weights, which had its activation"
            raise InputError("backbone.name", backbone.name, allowed)
        return "file", wanted
    known = f"a file, or a tag of {backbone.name}: {', '.join(tags) or 'it has none'}"
    raise InputError("backbone.pretrained", wanted, known)


def digest_of(path: Path, cache: Path) -> str:
    """SHA-256 (hex) of a file, kept by path, size and time of change: thirty silos need not read it thirty times."""
    about = path.stat()
    kept = cache / "digests" / key_of(str(path.resolve()), about.st_size, about.st_mtime_ns)
    with locked(kept.with_suffix(".lock")):
        if not kept.is_file():
            unfinished = kept.with_suffix(".unfinished")
            unfinished.write_text(file_digest(path), encoding="ascii")
            unfinished.replace(kept)
    return kept.read_text(encoding="ascii")


def weights_digest(backbone: Backbone, seed: int, cache: Path) -> str:
    """SHA-256 (hex) of what the frozen weights are made from: a key for caches.

    Raises:
        InputError: unknown model, tag or file.
    """
    config = config_of(backbone.name)
    kind, what = _source_of(backbone)
    if kind == "random":
        what = str(seed)
    elif kind == "file":
        what = digest_of(Path(what), cache)
    # Where a model is a file its contents are the configuration; random weights are drawn by its name, as written.
    name = "" if kind == "file" and backbone.name.endswith(".json") else backbone.name
    return key_of("weights", open_clip.__version__, name, config, kind, what)


def _full_model(backbone: Backbone, config: Mapping[str, Any], seed: int) -> nn.Module:
    """The whole model on the CPU with its weights."""
    kind, what = _source_of(backbone)
    if kind == "tag":
        try:
            fetched: nn.Module = open_clip.create_model(backbone.name, pretrained=what, weights_only=True)
        except (RuntimeError, OSError, ValueError) as error:
            instead = "a local file does without: --set backbone.pretrained=FILE"
            why = f"backbone.pretrained: {what} of {backbone.name} could not be fetched ({error}); {instead}"
            raise RunError(why) from error
        return fetched.eval().requires_grad_(False)
    # open_clip draws from the global generator and takes no other: it is put back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "backbone", backbone.name))
        model = _construct(backbone.name, config)
    if kind == "file":
        _load_checkpoint(model, Path(what))
    return model


def _modality_of(name: str) -> Modality:
    return "image" if name.startswith("visual.") else "text"


def _tensors(model: nn.Module) -> dict[Modality, dict[str, Tensor]]:
    """All parameters and buffers of each tower, also buffers that a state dict leaves out (masks, rotary tables)."""
    towers: dict[Modality, dict[str, Tensor]] = {modality: {} for modality in MODALITIES}
    seen: set[int] = set()
    parts = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, value in parts:
        if name not in SCALES:
            # The format refuses tensors that share memory, which tied weights do.
            tied = value.data_ptr() in seen
            seen.add(value.data_ptr())
            towers[_modality_of(name)][name] = (value.detach().clone() if tied else value.detach()).contiguous()
    return towers


def image_size(name: str, config: Mapping[str, Any]) -> int:
    """Edge of the square pictures a model takes [pixels]."""
    size = config["vision_cfg"].get("image_size", 224)
    edges = set(size) if isinstance(size, list | tuple) else {size}
    if len(edges) != 1:
        raise InputError("backbone.name", name, f"a model of square pictures, not {size}")
    return int(edges.pop())


def context_length(config: Mapping[str, Any]) -> int:
    """Tokens of one caption."""
    return int(config["text_cfg"].get("context_length", 77))


def weights(backbone: Backbone, seed: int, cache: Path) -> Weights:
    """The frozen weights in the cache, converted if they are not there yet.

    Args:
        backbone: name and ``pretrained``: a tag, a local file, or null for random weights drawn from the seed.
        seed: the scenario's seed; counts for random weights only.
        cache: folder.

    Raises:
        InputError: unknown model, tag or file, or a file that does not fit the model.
        RunError: a tag's weights could not be fetched, or the cache cannot be written.
    """
    config, made = config_of(backbone.name), preprocessing(backbone)

    def fill(folder: Path) -> None:
        for modality, tensors in _tensors(_full_model(backbone, config, seed)).items():
            safetensors.torch.save_file(tensors, folder / f"{modality}.safetensors")

    return Weights(
        folder=build_once(cache / "weights" / weights_digest(backbone, seed, cache), fill),
        name=backbone.name,
        config=config,
        mean=made.mean,
        std=made.std,
    )
