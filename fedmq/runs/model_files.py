"""Read a run's released files and their digests, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError
from fedmq.runs.release_config import ReleaseConfig
from fedmq.runs.run_records import RunSummary
from fedmq.storage.regular_files import check_regular
from fedmq.wire.fields import FieldError
from fedmq.wire.layout import MAX_BYTES, Layout
from fedmq.wire.payloads import ClassPrototypes, Memory, Payload

#: Payloads that may be released with a model, by kind: name in messages, and constructor from the file's arrays.
BESIDE: Mapping[str, tuple[str, Callable[..., Payload]]] = {
    Memory.KIND: ("a memory", Memory),
    ClassPrototypes.KIND: ("a query bank", partial(ClassPrototypes, modality="both")),
}
_ALLOWED = "a file of the run's release"


def parameters(path: Path, names: Sequence[str]) -> tuple[Layout, npt.NDArray[Any]]:
    """The layout and the parameters [P] of a released model, as sent over the wire.

    Args:
        path: ``model.safetensors``.
        names: names of the layout's entries, in the order that the file does not keep.

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
    alike = all(entry.dtype == "float32" for entry in layout.entries)
    return layout, np.frombuffer(raw, np.float32 if alike else np.uint8)


def beside(path: Path, kind: str) -> Payload:
    """Read a payload that was released with a model.

    Args:
        path: the file.
        kind: kind of the payload, a key of :data:`BESIDE`.

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

    check_regular(path, MAX_BYTES + (1 << 24), _ALLOWED)  # a safetensors file has a header in addition to the tensors
    try:
        return dict(load_file(path))
    except Exception as error:  # safetensors and the file system raise many types
        raise InputError(str(path), str(error), _ALLOWED) from None


def digests_of(record: RunSummary | ReleaseConfig) -> dict[str, str]:
    """Digests (hex) of the release and its data that a configuration or a summary records, by name in messages."""
    return digests_by_name(record.model_digest, record.data_digest, record.released_with)


def digests_by_name(model: str, data: str | None, with_it: Mapping[str, str]) -> dict[str, str]:
    """Digests (hex) of a release by name in messages; ``nothing`` if the data have none.

    Args:
        model: digest of the parameters.
        data: digest of the prepared data's content.
        with_it: digests of the payloads released with the model, by kind.
    """
    return {"a model": model, "data": data or "nothing", **with_it}
