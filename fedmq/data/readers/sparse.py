"""MATLAB's sparse arrays, column by column: the values, ``ir`` the row of each, ``jc`` where each column begins.

The numbers come from a file that anybody may have written: nothing is allocated or indexed by one that is not checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError

Array = npt.NDArray[Any]

#: Values of an array written out, 8 GiB of doubles: four times those of all NUS-WIDE with 1,000 tags.
MAX_VALUES = 2**30
_FORM = "MATLAB's sparse array: data, ir and jc, and the number of rows as MATLAB_sparse"


def dense(place: str, rows: int, data: Array, ir: Array, jc: Array) -> Array:
    """A sparse array written out, the axes the other way round.

    Args:
        place: what an error names.
        rows: of the array.
        data: values [nnz], of any type.
        ir: integers [nnz], the row of each value.
        jc: integers [columns + 1], where the values of each column begin; the last is their number.

    Returns:
        [columns, rows], of the type of ``data``.

    Raises:
        InputError: a row or a place that is not there, or an array too large to be written out.
    """
    columns = len(jc) - 1
    bounded(place, rows, columns)
    if jc[0] != 0 or (jc[1:] < jc[:-1]).any() or jc[-1] > min(len(ir), len(data)):
        raise InputError(f"{place}: jc", "columns that begin where no value is", f"ascending places, 0 to {len(ir)}")
    used = int(jc[-1])
    data, ir = data[:used], ir[:used]
    if used and (ir.min() < 0 or ir.max() >= rows):
        wrong = int(ir.max() if ir.min() >= 0 else ir.min())
        raise InputError(f"{place}: ir", f"row {wrong}", f"0 to {rows - 1}: the array has {rows} rows")
    found = np.zeros((columns, rows), dtype=data.dtype)
    counts = (jc[1:] - jc[:-1]).astype(np.int64)
    found[np.repeat(np.arange(columns), counts), ir.astype(np.int64)] = data
    return found


def bounded(place: str, rows: int, columns: int) -> None:
    """Refuse an array too large to be written out.

    Raises:
        InputError: it is, or has fewer than no rows or columns.
    """
    # An array without rows has no values, but its columns are counted all the same.
    if min(rows, columns) < 0 or max(rows, 1) * max(columns, 1) > MAX_VALUES:
        raise InputError(
            place, f"a sparse array of {rows} x {columns}", f"at most {MAX_VALUES} values when written out"
        )


def hdf5_shape(place: str, group: Any) -> tuple[int, int]:
    """Rows and columns of a sparse array in HDF5, as it says; nothing is read but its number of rows.

    Args:
        place: what an error names.
        group: of h5py; the attribute ``MATLAB_sparse`` tells a sparse array from other groups.

    Raises:
        InputError: it is not stored as MATLAB does.
    """
    rows = np.asarray(group.attrs.get("MATLAB_sparse", np.nan))
    wrong = [name for name in ("data", "ir", "jc") if name in group and len(getattr(group[name], "shape", ())) != 1]
    wrong += [
        name for name in ("ir", "jc") if name in group and name not in wrong and group[name].dtype.kind not in "iu"
    ]
    # MATLAB leaves data and ir away where every value is 0.
    if wrong or rows.size != 1 or rows.dtype.kind not in "iu" or "jc" not in group or not len(group["jc"]):
        raise InputError(place, f"a group of {', '.join(group)} (wrong: {', '.join(wrong) or 'jc or rows'})", _FORM)
    return int(rows.reshape(-1)[0]), len(group["jc"]) - 1


def hdf5_dense(place: str, group: Any) -> Array:
    """A sparse array in HDF5, written out as HDF5 stores MATLAB's arrays: [columns, rows].

    Args:
        place: what an error names.
        group: of h5py, with the attribute ``MATLAB_sparse``.

    Raises:
        InputError: as :func:`hdf5_shape` and :func:`dense`, or the values are no real numbers.
    """
    rows, columns = hdf5_shape(place, group)
    bounded(place, rows, columns)
    lengths = {name: len(group[name]) if name in group else 0 for name in ("data", "ir")}
    if lengths["data"] != lengths["ir"] or lengths["ir"] > rows * columns:
        found = f"{lengths['data']} values of {lengths['ir']} rows"
        raise InputError(place, found, f"as many of both, at most {rows} x {columns}")
    if "data" in group and group["data"].dtype.kind not in "iufb":
        raise InputError(f"{place}: data", f"dtype {group['data'].dtype}", "real numbers")
    data, ir = (group[name][()] if name in group else np.zeros(0, np.uint8) for name in ("data", "ir"))
    return dense(place, rows, np.asarray(data), np.asarray(ir), np.asarray(group["jc"][()]))
