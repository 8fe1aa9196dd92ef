"""Any timm model as a frozen image encoder: its features before the classifier.

``timm:vgg19`` gives VGG-19's fc7 (4,096, after its ReLU), also from torchvision's file. Weights come from
``backbone.pretrained``: a local file, one of timm's tags for the model, or null for random weights.
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
from fedmq.encoders.clip_weights import digest_of, read_checkpoint
from fedmq.errors import InputError, RunError
from fedmq.extras import package
from fedmq.seeds import derive
from fedmq.storage.cache import key_of


def architecture(backbone: Backbone) -> str:
    """The model's name without its prefix.

    Raises:
        InputError: timm is not installed or knows no such model; close names are listed.
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
    """``("random", "")``, ``("tag", tag)`` or ``("file", path)``.

    Raises:
        InputError: neither a file nor a tag of the model.
    """
    name, wanted = architecture(backbone), backbone.pretrained
    if wanted is None:
        return "random", ""
    tags = [
        found.partition(".")[2] for found in package("timm", "embedded", "backbone.name").list_pretrained(f"{name}.*")
    ]
    if wanted in tags:
        return "tag", wanted
    if Path(wanted).is_file():
        return "file", wanted
    raise InputError("backbone.pretrained", wanted, f"a file, or a tag of {name}: {', '.join(tags) or 'it has none'}")


def preprocessing(backbone: Backbone) -> Mapping[str, Any]:
    """How the model's pictures are made: timm's data configuration, of the tag or of the model's first one.

    Returns:
        timm's ``input_size``, ``mean``, ``std``, ``crop_pct``, ``crop_mode`` and ``interpolation``.

    Raises:
        InputError: unknown model, tag or file, or a way to scale pictures that cannot be had here.
    """
    timm, name, (kind, what) = package("timm", "embedded", "backbone.name"), architecture(backbone), _source(backbone)
    found = timm.get_pretrained_cfg(f"{name}.{what}" if kind == "tag" else name)
    if found is None:
        # A name from before timm had tags: only the model that it stands for knows.
        with torch.random.fork_rng(devices=[]):
            how: Mapping[str, Any] = timm.data.resolve_model_data_config(timm.create_model(name))
    else:
        how = timm.data.resolve_data_config(pretrained_cfg=found.to_dict())
    _, height, width = how["input_size"]
    if how["crop_mode"] not in ("center", "squash") or height != width:
        made = f"{backbone.name}, whose pictures are {width} x {height} with crop_mode {how['crop_mode']}"
        raise InputError("backbone.name", made, "a model of square pictures with crop_mode center or squash")
    return how


def weights_digest(backbone: Backbone, seed: int, cache: Path) -> str:
    """SHA-256 (hex) of what the weights are made from: a key for caches.

    Raises:
        InputError: unknown model, tag or file.
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
    """Put a file's weights into the model; all but the classifier must fit.

    Raises:
        InputError: a parameter is missing or of another shape.
    """
    state: Mapping[str, Tensor] = read_checkpoint(path)
    wanted = model.state_dict()
    if set(wanted) - set(state):
        # timm's own translation of other projects' names, where it has one.
        module = importlib.import_module(type(model).__module__)
        translate = getattr(module, "checkpoint_filter_fn", None)
        state = translate(state, model) if translate else getattr(module, "_filter_fn", lambda same: same)(state)
    for name, value in wanted.items():
        if name not in state or state[name].shape != value.shape:
            found = f"shape {list(state[name].shape)}" if name in state else "no such parameter"
            raise InputError(f"backbone.pretrained: {path}: {name}", found, f"shape {list(value.shape)}")
    model.load_state_dict({name: state[name] for name in wanted})


def load(backbone: Backbone, seed: int, device: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model without its classifier, and how its pictures are made.

    Args:
        backbone: ``timm:NAME`` and ``pretrained``.
        seed: of random weights.
        device: where it computes.

    Returns:
        The frozen model, and what :func:`preprocessing` says.

    Raises:
        InputError: unknown model, tag or file, or a file that does not fit.
        RunError: a tag's weights could not be fetched.
    """
    timm = package("timm", "embedded", "backbone.name")
    name, (kind, what), how = architecture(backbone), _source(backbone), preprocessing(backbone)
    # timm draws from the global generator and takes no other: it is put back as it was.
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
