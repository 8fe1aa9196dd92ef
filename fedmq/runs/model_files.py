"""What a run released, by its files: digests of the model and of what lies beside it, found without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError
from fedmq.runs.run_records import ReleaseConfig, RunSummary
from fedmq.wire.fields import FieldError
from fedmq.wire.layout import Layout
from fedmq.wire.messages import ClassPrototypes, Memory, Payload

#: What may lie beside a model, by the kind of its payload: what it is, and how it is made of the file's arrays.
BESIDE: Mapping[str, tuple[str, Callable[..., Payload]]] = {
    Memory.KIND: ("a memory", Memory),
    ClassPrototypes.KIND: ("a query bank", partial(ClassPrototypes, modality="both")),
}
_ALLOWED = "a file of the run's release"


def parameters(path: Path, names: Sequence[str]) -> tuple[Layout, npt.NDArray[Any]]:
    """The layout and the parameters [P] of a released model, as they went over the wire.

    Args:
        path: ``model.safetensors``.
        names: of the layout's entries in their order, which the file does not keep.

    Raises:
        InputError: the file is damaged, or holds other tensors.
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
    """What lies beside a model, as the payload that it was.

    Args:
        path: the file.
        kind: of the payload, one of :data:`BESIDE`.

    Raises:
        InputError: the file is damaged or holds something else.
    """
    what, make = BESIDE[kind]
    try:
        return make(**_arrays(path))
    except (TypeError, FieldError) as error:
        raise InputError(str(path), str(error), what) from None


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    from safetensors.numpy import load_file  # noqa: PLC0415 - most readers of a log need no release

    try:
        return dict(load_file(path))
    except Exception as error:  # safetensors and the file system raise what they like
        raise InputError(str(path), str(error), _ALLOWED) from None


def digests_of(told: RunSummary | ReleaseConfig) -> dict[str, str]:
    """What a configuration or a summary says was released, and of which data: digests (hex) by what it is."""
    return digests_by_name(told.model_digest, told.data_digest, told.released_with)


def digests_by_name(model: str, data: str | None, with_it: Mapping[str, str]) -> dict[str, str]:
    """Digests (hex) of a release, as errors name what they are of; ``nothing`` where data have none.

    Args:
        model: of the parameters.
        data: of the prepared data's content.
        with_it: of what was released with the model, by payload kind.
    """
    return {"a model": model, "data": data or "nothing", **with_it}
