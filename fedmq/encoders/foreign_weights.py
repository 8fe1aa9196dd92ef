"""Read other people's weights as plain values, in the child process of :mod:`fedmq.storage.quarantine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, JsonValue

from fedmq.packages import package
from fedmq.storage.json_files import Stored, read_json

_Layers = Annotated[int, Field(gt=0, le=1000)]


class _Tower(Stored):
    """The part of a model's configuration on one tower."""

    layers: _Layers | list[_Layers] | None = None


class _Config(Stored):
    """A model's configuration."""

    embed_dim: int
    vision_cfg: _Tower
    text_cfg: _Tower


def config_in(path: str) -> dict[str, JsonValue]:
    """The configuration of an open_clip model in a .json file."""
    return read_json(Path(path), _Config, "a configuration of an open_clip model").plain()


def state_of(path: str) -> dict[str, Any]:
    """The arrays and whole numbers of a state dict by name, of a .safetensors file or one of torch."""
    torch = package("torch", "embedded", path)
    if path.endswith(".safetensors"):
        state = package("safetensors.torch", "embedded", path).load_file(path)
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            if "weights_only" in str(error):  # torch's own message advises to disable the check
                raise TypeError("something other than tensors") from None
            raise
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not state:
        raise TypeError(f"a {type(state).__name__} in place of names and tensors")
    # NumPy has no bfloat16; the model computes in float32 anyway.
    return {
        str(name).removeprefix("module."): value
        if isinstance(value, int)
        else (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
        for name, value in state.items()
    }


def structs_of(path: str) -> dict[str, Any]:
    """The values of a .mat file by name: structs as dicts, cells as lists, strings as str, other values as arrays.

    SciPy's own simplification also squeezes arrays: filters [1, 1, 4096, 4096] would lose their first two axes.
    """
    read = package("scipy.io", "formats", path).loadmat(path)
    return {name: _plain(value) for name, value in read.items() if not name.startswith("__")}


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.names is not None:
        structs = [{name: _plain(item[name]) for name in value.dtype.names} for item in value.ravel("F")]
        return structs[0] if len(structs) == 1 else structs
    if value.dtype == object:
        return [_plain(item) for item in value.ravel("F")]
    if value.dtype.kind == "U":
        return "".join(value.ravel())
    return value
