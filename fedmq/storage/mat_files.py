"""Read a MATLAB file with structs as plain Python values, in the child process of :mod:`fedmq.storage.quarantine`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmq.packages import package


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
