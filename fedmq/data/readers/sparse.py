"""Convert MATLAB's sparse arrays (compressed columns: values, row indices ``ir``, column offsets ``jc``) to dense ones.

Files are not trusted: every size and index is checked before it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError

Array = npt.NDArray[Any]

#: Maximum number of values of a dense array, 8 GiB of doubles: four times the size of NUS-WIDE with 1,000 tags.
MAX_VALUES = 2**30
_FORM = "MATLAB's sparse array: data, ir and jc, and the number of rows as MATLAB_sparse"


def dense(place: str, rows: int, data: Array, ir: Array, jc: Array) -> Array:
    """The transposed dense form of a sparse array.

    Args:
        place: the array, for error messages.
        rows: number of rows.
        data: values [nnz], any dtype.
        ir: integers [nnz], row index of each value.
        jc: integers [columns + 1], offset of each column's first value; the last is the number of values.

    Returns:
        [columns, rows], dtype of ``data``.

    Raises:
        InputError: an index or offset is out of range, or the dense array is too large.
    """
    columns = len(jc) - 1
    bounded(place, rows, columns)
    if jc[0] != 0 or (jc[1:] < jc[:-1]).any() or jc[-1] > min(len(ir), len(data)):
        raise InputError(
            f"{place}: jc", "column offsets out of order or out of range", f"ascending offsets, 0 to {len(ir)}"
        )
    used = int(jc[-1])
    data, ir = data[:used], ir[:used]
    if used and (ir.min() < 0 or ir.max() >= rows):
        wrong = int(ir.max() if ir.min() >= 0 else ir.min())
        raise InputError(f"{place}: ir", f"row {wrong}", f"0 to {rows - 1}: the array has {rows} rows")
    values = np.zeros((columns, rows), dtype=data.dtype)
    counts = (jc[1:] - jc[:-1]).astype(np.int64)
    values[np.repeat(np.arange(columns), counts), ir.astype(np.int64)] = data
    return values


def bounded(place: str, rows: int, columns: int) -> None:
    """Reject a sparse array whose dense form is too large.

    Raises:
        InputError: the array is too large, or a dimension is negative.
    """
    # An array without rows has no values, but still allocates one offset per column.
    if min(rows, columns) < 0 or max(rows, 1) * max(columns, 1) > MAX_VALUES:
        raise InputError(
            place, f"a sparse array of {rows} x {columns}", f"at most {MAX_VALUES} values when written out"
        )


def hdf5_shape(place: str, group: Any) -> tuple[int, int]:
    """Rows and columns of a sparse array in HDF5, from its metadata alone.

    Args:
        place: the array, for error messages.
        group: h5py group with the attribute ``MATLAB_sparse``, which marks sparse arrays and holds the number of rows.

    Raises:
        InputError: the group is not a sparse array as MATLAB stores it.
    """
    rows = np.asarray(group.attrs.get("MATLAB_sparse", np.nan))
    wrong = [name for name in ("data", "ir", "jc") if name in group and len(getattr(group[name], "shape", ())) != 1]
    wrong += [
        name for name in ("ir", "jc") if name in group and name not in wrong and group[name].dtype.kind not in "iu"
    ]
    # MATLAB omits data and ir if all values are 0.
    if wrong or rows.size != 1 or rows.dtype.kind not in "iu" or "jc" not in group or not len(group["jc"]):
        raise InputError(place, f"a group of {', '.join(group)} (wrong: {', '.join(wrong) or 'jc or rows'})", _FORM)
    return int(rows.reshape(-1)[0]), len(group["jc"]) - 1


def hdf5_dense(place: str, group: Any) -> Array:
    """Read a sparse array in HDF5 as a dense one, [columns, rows], as HDF5 stores MATLAB's dense arrays.

    Args:
        place: the array, for error messages.
        group: h5py group with the attribute ``MATLAB_sparse``.

    Raises:
        InputError: as :func:`hdf5_shape` and :func:`dense`, or the values are not real numbers.
    """
    rows, columns = hdf5_shape(place, group)
    bounded(place, rows, columns)
    lengths = {name: len(group[name]) if name in group else 0 for name in ("data", "ir")}
    if lengths["data"] != lengths["ir"] or lengths["ir"] > rows * columns:
        found = f"{lengths['data']} values and {lengths['ir']} row indices"
        raise InputError(place, found, f"the same number of both, at most {rows} x {columns}")
    if "data" in group and group["data"].dtype.kind not in "iufb":
        raise InputError(f"{place}: data", f"dtype {group['data'].dtype}", "real numbers")
    data, ir = (group[name][()] if name in group else np.zeros(0, np.uint8) for name in ("data", "ir"))
    return dense(place, rows, np.asarray(data), np.asarray(ir), np.asarray(group["jc"][()]))
