"""Check a sentence encoder's folder before sentence-transformers loads it, and the parameters that were loaded.

The library draws weights that are missing at random, makes as many and as large layers as a configuration says, and
before version 6 imports whatever classes ``modules.json`` names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3
import torch
from safetensors import safe_open
from torch import Tensor, nn

from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.storage.regular_files import check_regular, read_regular

#: Classes of modules that may follow each other, by their names in ``modules.json``.
_MODULES: Final = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")
_DENSE: Final = ("in_features", "out_features")
#: Parts of the names of configuration keys that say how often something is repeated.
_REPEATED: Final = ("layer", "block", "expert", "group", "stage")
#: Largest whole number in a configuration unless the weights have more values.
_MOST_NUMBER: Final = 1 << 20
#: A network may have this many times the parameters of the files: parts that encode no sentence may be left out.
_TIMES: Final = 4
_MOST_BYTES: Final = 1 << 38
#: Part of BERT that takes part in no sentence vector; files often lack it.
_UNUSED: Final = "pooler."


@dataclass(frozen=True)
class FolderWeights:
    """What the weights of a folder hold.

    Args:
        tensors: number of tensors.
        values: number of their values.
    """

    tensors: int
    values: int


def check_folder(folder: Path, place: str) -> None:
    """Refuse a folder whose configuration asks for other modules, or for far larger ones than its weights are.

    Args:
        folder: folder of the encoder.
        place: prefix of the place in errors.

    Raises:
        InputError: see above, or a file is damaged, or no regular file.
    """
    found, modules = _weights(folder, place), list(_modules(folder, place))
    if [kind for _, kind in modules[:1]] != ["Transformer"]:
        beginning = modules[0][1] if modules else "no module"
        raise InputError(f"{place}: {folder / 'modules.json'}", beginning, "a list that begins with a Transformer")
    for path, kind in modules:
        if kind == "Transformer":
            _check_network(path, found, place)
        elif (path / "config.json").exists():
            described = _read(path / "config.json", place)
            _check_numbers(path / "config.json", described, found, place)
            sizes = [described.get(name) if isinstance(described, dict) else None for name in _DENSE]
            if kind == "Dense":
                _check_dense(path, sizes, found, place)


def _check_dense(path: Path, sizes: list[Any], found: FolderWeights, place: str) -> None:
    if not all(type(size) is int and size > 0 for size in sizes) or sizes[0] * sizes[1] > found.values:
        allowed = f"in_features times out_features, at most the {found.values:,} values of the weights"
        raise InputError(f"{place}: {path / 'config.json'}", str(sizes)[:60], allowed)
    if not (path / "model.safetensors").is_file():
        raise InputError(f"{place}: {path}", "no model.safetensors", "the weights of this layer")


def _weights(folder: Path, place: str) -> FolderWeights:
    tensors = values = 0
    for path in sorted(folder.rglob("*.safetensors")):
        check_regular(path, _MOST_BYTES, "weights of a sentence encoder")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    tensors += 1
                    values += torch.Size(file.get_slice(name).get_shape()).numel()
        except Exception as error:  # safetensors raises various exceptions on a damaged file
            raise InputError(f"{place}: {path}", _line(error), "a readable safetensors file") from None
    return FolderWeights(tensors, values)


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _read(path: Path, place: str) -> Any:
    try:
        return json.loads(read_regular(path, "a file of a sentence encoder"))
    except (ValueError, RecursionError):
        raise InputError(f"{place}: {path}", "something that is not JSON", "a file of a sentence encoder") from None


def _modules(folder: Path, place: str) -> Iterator[tuple[Path, str]]:
    """Folder and class of each module; a network alone without ``modules.json``."""
    listed = folder / "modules.json"
    if not listed.exists():
        yield folder, "Transformer"
        return
    described = _read(listed, place)
    for each in described if isinstance(described, list) else [None]:
        kind = str(each.get("type")) if isinstance(each, dict) else ""
        inside = str(each.get("path")) if isinstance(each, dict) else ""
        beginning, _, name = kind.rpartition(".")
        if beginning.partition(".")[0] != "sentence_transformers" or name not in _MODULES:
            allowed = f"modules of sentence_transformers: {', '.join(_MODULES)}"
            raise InputError(f"{place}: {listed}", kind[:80] or "no list of modules", allowed)
        path = folder / inside
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_dir():
            raise InputError(f"{place}: {listed}", inside[:80], "a folder in that of the encoder")
        yield path, name


def _check_numbers(path: Path, value: Any, found: FolderWeights, place: str, key: str = "") -> None:
    """Refuse numbers that ask for more layers than there are weights, or for far larger ones."""
    match value:
        case dict():
            for name, each in value.items():
                _check_numbers(path, each, found, place, str(name))
        case list():
            for each in value:
                _check_numbers(path, each, found, place, key)
        case int() if not isinstance(value, bool):
            repeated = any(part in key for part in _REPEATED)
            most = found.tensors if repeated else max(_MOST_NUMBER, found.values)
            if value > most:
                what = f"{most:,} at most: the weights have {found.tensors:,} tensors with {found.values:,} values"
                raise InputError(f"{place}: {path}: {key[:60]}", str(value)[:60], what)


def _check_network(path: Path, found: FolderWeights, place: str) -> None:
    """Make the network without memory for its weights, and refuse it if it is far larger than they are."""
    file = path / "config.json"
    _check_numbers(file, _read(file, place), found, place)
    transformers = package("transformers", "bert", str(path))
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            network = transformers.AutoModel.from_config(config, trust_remote_code=False)
        size = sum(each.numel() for each in (*network.parameters(), *network.buffers()))
    except Exception as error:  # transformers raises various exceptions on an invalid configuration
        raise InputError(f"{place}: {file}", _line(error), "the configuration of a sentence encoder") from None
    if size > max(_MOST_NUMBER, _TIMES * found.values):
        allowed = f"a network for the {found.values:,} values of the weights"
        raise InputError(f"{place}: {file}", f"{size:,} parameters", allowed)


def check_loaded(folder: Path, model: nn.Module, place: str) -> None:
    """Refuse a loaded encoder with parameters that its files lack, which would differ from process to process.

    Args:
        folder: folder of the encoder.
        model: the encoder.
        place: prefix of the place in errors.

    Raises:
        InputError: names the first such parameter.
    """
    # A constant, as in a new normalisation, is the same in every process.
    loaded = {name: value for name, value in model.named_parameters() if _UNUSED not in name and not _constant(value)}
    dtypes = {value.dtype for value in loaded.values()}
    known = {_content(value.to(dtype)) for value in _tensors(folder) for dtype in dtypes}
    for name, value in loaded.items():
        if _content(value) not in known:
            found = f"no values for {name} {list(value.shape)}"
            raise InputError(f"{place}: {folder}", found, "weights of all layers of config.json, in safetensors files")


def _constant(value: Tensor) -> bool:
    return value.numel() == 0 or bool((value == value.reshape(-1)[0]).all())


def _tensors(folder: Path) -> Iterator[Tensor]:
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                value = file.get_tensor(name)
                if value.is_floating_point():
                    yield value


def _content(value: Tensor) -> tuple[int, str]:
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return value.numel(), blake3.blake3(raw.tobytes()).hexdigest()
