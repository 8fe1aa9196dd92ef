"""timm models as frozen image encoders: the features before the classifier.

``timm:vgg19`` gives VGG-19's fc7 (4,096, after its ReLU), also with torchvision's weights. ``backbone.pretrained`` is a
local file, one of timm's tags for the model, or null for random weights.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmq.config.scenario import TIMM, Backbone
from fedmq.encoders.clip_weights import digest_of, fitting, read_checkpoint, source_of
from fedmq.errors import InputError, RunError
from fedmq.packages import package
from fedmq.seeds import derive
from fedmq.storage.cache import key_of


def architecture(backbone: Backbone) -> str:
    """The model's timm name, without the prefix ``timm:``.

    Raises:
        InputError: timm is not installed or has no such model; the message lists similar names.
    """
    timm = package("timm", "embedded", "backbone.name")
    name = backbone.name.removeprefix(TIMM)
    if not timm.is_model(name):
        near = ", ".join(difflib.get_close_matches(name, timm.list_models(), 5, 0.5))
        raise InputError(
            "backbone.name", backbone.name, f"timm: and a name of timm.list_models(){near and f', close: {near}'}"
        )
    return name


def _source(backbone: Backbone) -> tuple[str, str]:
    """Source of the weights, see :func:`source_of`."""
    name = architecture(backbone)
    models = package("timm", "embedded", "backbone.name").list_pretrained(f"{name}.*")
    return source_of(name, backbone.pretrained, [model.partition(".")[2] for model in models])


def preprocessing(backbone: Backbone) -> Mapping[str, Any]:
    """The model's preprocessing: timm's data configuration of the tag, or of the model's default tag.

    Returns:
        timm's ``input_size``, ``mean``, ``std``, ``crop_pct``, ``crop_mode`` and ``interpolation``.

    Raises:
        InputError: the model, tag or file is unknown, or its resizing is not supported.
    """
    timm, name, (kind, what) = package("timm", "embedded", "backbone.name"), architecture(backbone), _source(backbone)
    config = timm.get_pretrained_cfg(f"{name}.{what}" if kind == "tag" else name)
    if config is None:
        # Deprecated model names have no configuration; the model they resolve to has one.
        with torch.random.fork_rng(devices=[]):
            how: Mapping[str, Any] = timm.data.resolve_model_data_config(timm.create_model(name))
    else:
        how = timm.data.resolve_data_config(pretrained_cfg=config.to_dict())
    _, height, width = how["input_size"]
    if how["crop_mode"] not in ("center", "squash") or height != width:
        found = f"{backbone.name}, whose images are {width} x {height} with crop_mode {how['crop_mode']}"
        raise InputError("backbone.name", found, "a model of square images with crop_mode center or squash")
    return how


def weights_digest(backbone: Backbone, seed: int, cache: Path) -> str:
    """SHA-256 (hex) of the source of the weights, used as a cache key.

    Raises:
        InputError: the model, tag or file is unknown.
    """
    kind, what = _source(backbone)
    version = package("timm", "embedded", "backbone.name").__version__
    return key_of(
        "timm",
        version,
        backbone.name,
        kind,
        {"random": str(seed), "tag": what}.get(kind) or digest_of(Path(what), cache),
    )


def _load(model: nn.Module, path: Path) -> None:
    """Load a file's weights into the model; all parameters but the classifier's must match."""
    state: Mapping[str, Tensor] = read_checkpoint(path)
    wanted = model.state_dict()
    if set(wanted) - set(state):
        # Use timm's conversion of other projects' parameter names, if it has one.
        module = importlib.import_module(type(model).__module__)
        convert = getattr(module, "checkpoint_filter_fn", None)
        state = convert(state, model) if convert else getattr(module, "_filter_fn", lambda same: same)(state)
    model.load_state_dict(fitting(state, wanted, path))


def load(backbone: Backbone, seed: int, device: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """A model without its classifier, frozen, and its :func:`preprocessing`.

    Raises:
        InputError: the model, tag or file is unknown, or the file does not match the model.
        RunError: a tag's weights could not be downloaded.
    """
    timm = package("timm", "embedded", "backbone.name")
    name, (kind, what), how = architecture(backbone), _source(backbone), preprocessing(backbone)
    # timm initialises from the global generator, whose state fork_rng restores.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "backbone", backbone.name))
        try:
            tagged = f"{name}.{what}" if kind == "tag" else name
            model: nn.Module = timm.create_model(tagged, pretrained=kind == "tag", num_classes=0)
        except (RuntimeError, OSError, ValueError) as error:
            raise RunError(f"weights {what} of {name} could not be fetched: {error}") from error
    if kind == "file":
        _load(model, Path(what))
    model.eval().requires_grad_(False)
    return model.to(device), how
