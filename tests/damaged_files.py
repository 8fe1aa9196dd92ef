"""Damaged files of any kind: of their bytes, of what their format holds, and of the folder that they are in.

:func:`folders` is a Hypothesis strategy of damaged folders, and :func:`read_damaged` reads one: a reader may return or
raise ``InputError`` with one line. The kinds are in the modules ``*file_kinds.py``; ``benchmarks/fuzz.py`` lists all.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import random
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import h5py  # type: ignore[import-untyped]
import numpy as np
import pyarrow
import pyarrow.parquet
import yaml
from hypothesis import strategies as st

from fedmq.errors import InputError


@dataclass(frozen=True)
class Special:
    """Something else than a regular file.

    Args:
        what: a folder, a named pipe, or a symbolic link.
        target: of a link.
    """

    what: Literal["folder", "pipe", "link"]
    target: str = ""


#: Contents of files by path within a folder.
Folder = Mapping[str, bytes | Special]


@dataclass(frozen=True)
class Kind:
    """One kind of files.

    Args:
        valid: makes a folder with a valid example.
        read: reads it; given the folder.
        repaired: computes the checksums of a damaged file anew, given its name and content, so that the checks behind
            them are reached in half of the examples; None for files without checksums.
        most: most damaged files in an example.
    """

    valid: Callable[[], Folder]
    read: Callable[[Path], object]
    repaired: Callable[[str, bytes], bytes] | None = None
    most: int = 2


class Damaged(dict[str, "bytes | Special"]):
    """The content of a damaged folder; its representation has the sizes only."""

    def __repr__(self) -> str:
        shown = ((name, f"{len(it)} bytes" if isinstance(it, bytes) else it) for name, it in sorted(self.items()))
        return f"Damaged({', '.join(f'{name!r}: {what}' for name, what in shown)})"


#: Values that replace others in what a format holds.
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 2**70, 1e308, "", "x", "\x00", "\ud800", "0" * 64, "../../etc/passwd", "<script>", "=1+1",
    [], {}, [[]], [None] * 3, {"a": {"b": []}}, float("nan"), "silo-00", "coordinator", "2026-13-45",
)  # fmt: skip
_NUMBERS = [0, 1, -1, 127, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1]
_TEXTS = [
    b"", b"nan", b"-1", b"1e999", b"9" * 5000, b"[", b"{", b"'", b'"', b"*a", b"&a ", b"!!python/object:os.system ",
    b"\x00", b"\xff", b"\xed\xa0\x80", b"\\ud83d", b"|", b",", b"\n", b"\r", b"\t", b": ", b"- ", b"<<", b"true",
    b"[" * 3000, b"['a', 'b']", b"../../etc/passwd", b"/dev/zero", "\u202e\u2028".encode(), b"A" * 20_000,
]  # fmt: skip
_SPECIALS = (
    Special("folder"),
    Special("pipe"),
    *(Special("link", target) for target in ("/etc/passwd", "/dev/zero", "..", "/etc", "nothing", "self")),
)
#: Names of fields, columns and arrays that readers know.
_FIELDS = ("image", "text", "caption", "title", "labels", "label", "split", "key", "file_name", "IAll", "x", "")
#: Types, names and headers of members of archives.
_TAR: tuple[Any, ...] = (
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, b"S", b"Z"),
    *("../x.png", "/x.png", "a.b.c.json", "é.txt", ".", "x.png/y.txt", "x" * 5000),
    *({key: value} for key in ("size", "path", "GNU.sparse.map") for value in ("9" * 30, "-1", "1,2")),
)
_DTYPES = ("f2", "f4", "f8", "i1", "u1", "i8", "u8", "?", "c8", "U3", "S2", "M8[s]")


def _chance(draw: random.Random, percent: int) -> bool:
    return draw.randrange(100) < percent


# --- bytes ----------------------------------------------------------------------------------------------------------
def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """A copy of a file with one to four random changes of its bytes."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(data))
        end = min(len(data), at + draw.randint(1, max(1, len(data) // 4)))
        match draw.randrange(9):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([data[at] ^ 1 << draw.randrange(8)]) if at < len(data) else b""
            case 2:
                del data[at:]
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end] * draw.randint(1, 3)
            case 5:
                width = draw.choice([1, 2, 4, 8])
                number = draw.choice(_NUMBERS) % (1 << 8 * width)
                data[at : at + width] = number.to_bytes(width, draw.choice(["little", "big"]))
            case 6:
                data[at:at] = draw.choice(_TEXTS)
            case 7:
                other = draw.randint(0, len(data))
                data[at:end] = data[other : other + (end - at)]
            case _:
                numbers = list(re.finditer(rb"\d+", data))
                if numbers:
                    data[slice(*draw.choice(numbers).span())] = str(draw.choice(_NUMBERS)).encode()
    return bytes(data)


# --- what a format holds --------------------------------------------------------------------------------------------
def replaced(value: Any, draw: random.Random, strange: Sequence[Any] = STRANGE) -> Any:
    """Plain data in which one part is removed, repeated, moved, nested or replaced.

    Args:
        value: lists and dicts, also of arrays.
        draw: source of random numbers.
        strange: values that replace others.
    """
    if isinstance(value, dict) and value and _chance(draw, 88):
        key = draw.choice(list(value))
        match draw.randrange(12):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return value | {f"{key}x": value[key]}
            case 2:
                other = draw.choice([*value, *_FIELDS])
                return {other if name == key else name: part for name, part in value.items()}
        return value | {key: replaced(value[key], draw, strange)}
    if isinstance(value, list) and value and _chance(draw, 82):
        place = draw.randrange(len(value))
        match draw.randrange(11):
            case 0:
                return [*value[:place], *value[place + 1 :]]
            case 1:
                return [*value, *value[place:]] * draw.randint(1, 40)
            case 2:
                return [*value[place:], *value[:place]]
        return [*value[:place], replaced(value[place], draw, strange), *value[place + 1 :]]
    if isinstance(value, np.ndarray):
        return _array(value, draw)
    if _chance(draw, 2):
        nested: Any = value
        for _ in range(draw.randint(10, 600)):
            nested = [nested]
        return nested
    return draw.choice(strange)


def _array(value: np.ndarray, draw: random.Random) -> Any:
    """An array of another dtype or shape, or with other values."""
    changes: list[Callable[[], Any]] = [
        lambda: value.astype(draw.choice(_DTYPES)),
        lambda: value.reshape(-1),
        lambda: value[: draw.randint(0, len(value))],
        lambda: np.concatenate([value, value]),
        lambda: value[..., None],
        lambda: np.full(value.shape, draw.choice([np.nan, np.inf, -1, 0, 1e30])),
        lambda: np.array(draw.choice([0, "x", np.nan])),
        lambda: np.transpose(value),
    ]
    return draw.choice(changes)()


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _read_line(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


def _write_lines(lines: Sequence[Any]) -> bytes:
    return b"\n".join(_text(line) if isinstance(line, str) else _json(line) for line in lines)


def _read_csv(content: bytes) -> dict[str, list[str]]:
    """The cells of each column."""
    text = content.decode()
    header, *rows = csv.reader(io.StringIO(text), delimiter="\t" if "\t" in text.partition("\n")[0] else ",")
    return {name: list(column) for name, *column in zip(header, *rows, strict=True)}


def _write_csv(columns: Mapping[str, Any]) -> bytes:
    made = io.StringIO()
    cells = [[name, *(column if isinstance(column, list) else [column])] for name, column in columns.items()]
    csv.writer(made).writerows(zip_longest(*cells, fillvalue=""))
    return _text(made.getvalue())


def _read_safetensors(content: bytes) -> list[Any]:
    end = 8 + int.from_bytes(content[:8], "little")
    return [json.loads(content[8:end]), content[end:]]


def _write_safetensors(parts: Sequence[Any]) -> bytes:
    header = _json(parts[0])
    return len(header).to_bytes(8, "little") + header + parts[1]


def _read_npz(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        return dict(stored)


def _read_hdf5(content: bytes) -> dict[str, np.ndarray]:
    with h5py.File(io.BytesIO(content)) as opened:
        return {name: opened[name][()] for name in opened}


def _write_hdf5(arrays: Mapping[str, Any], file: io.BytesIO) -> None:
    with h5py.File(file, "w") as written:
        for name, each in arrays.items():
            written[name] = each


def _read_tar(content: bytes) -> list[dict[str, Any]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as opened:
        return [
            {"name": each.name, "type": each.type, "pax_headers": {"comment": "x"},
             "content": _read_line(opened.extractfile(each).read().decode("latin-1"))}  # type: ignore[union-attr]
            for each in opened
        ]  # fmt: skip


def _write_tar(members: Sequence[Mapping[str, Any]], file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as written:
        for each in members:
            info, content = tarfile.TarInfo(each["name"]), each["content"]
            content = content.encode("latin-1") if isinstance(content, str) else _json(content)
            info.type, info.pax_headers, info.size = each["type"], each["pax_headers"], len(content)
            written.addfile(info, io.BytesIO(content))


def _to_file(write: Callable[[Any, io.BytesIO], object]) -> Callable[[Any], bytes]:
    def written(value: Any) -> bytes:
        file = io.BytesIO()
        write(value, file)
        return file.getvalue()

    return written


#: What reads a format, and what writes it. Behind MATLAB's and Arrow's files stands the same code of ours as behind
#: HDF5 and Parquet.
_FORMATS: Mapping[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    **dict.fromkeys((".json", ".request"), (json.loads, _json)),
    **dict.fromkeys(
        (".jsonl", ".journal", ".txt", ".list", ".eng", ".xml"),
        (lambda content: list(map(_read_line, content.decode().split("\n"))), _write_lines),
    ),
    ".yaml": (yaml.safe_load, lambda value: _text(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))),
    **dict.fromkeys((".csv", ".tsv"), (_read_csv, _write_csv)),
    ".safetensors": (_read_safetensors, _write_safetensors),
    ".npz": (_read_npz, _to_file(lambda arrays, file: np.savez(file, **arrays))),
    ".npy": (
        lambda content: np.load(io.BytesIO(content), allow_pickle=False),
        _to_file(lambda array, file: np.save(file, array)),
    ),
    ".h5": (_read_hdf5, _to_file(_write_hdf5)),
    ".parquet": (
        lambda content: pyarrow.parquet.read_table(io.BytesIO(content)).to_pydict(),
        _to_file(lambda columns, file: pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=2)),
    ),
    ".tar": (_read_tar, _to_file(_write_tar)),
}


# --- bytes behind a checksum or an encoding ---------------------------------------------------------------------------
def _zip(content: bytes, draw: random.Random) -> bytes:
    """A damaged member, with the right checksum, so that what it holds is reached."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as opened, zipfile.ZipFile(made, "w") as written:
        chosen = draw.choice(opened.namelist())
        for name in opened.namelist():
            inside = opened.read(name)
            written.writestr(name, damaged_bytes(inside, draw) if name == chosen else inside)
    return made.getvalue()


def _png(content: bytes, draw: random.Random) -> bytes:
    """Another size, depth or colour type in the header, with a right checksum."""
    header = bytearray(content[12:29])
    if _chance(draw, 50):
        at = 4 * draw.randint(1, 2)
        header[at : at + 4] = (draw.choice(_NUMBERS) % 2**32).to_bytes(4, "big")
    else:
        header[draw.randint(12, 16)] = draw.randrange(256)
    return content[:12] + bytes(header) + zlib.crc32(header).to_bytes(4, "big") + content[33:]


def _pem(content: bytes, draw: random.Random) -> bytes:
    """Damage within a key's encoding in base64, and another name of what is encoded."""
    body = b"".join(line for line in content.splitlines() if not line.startswith(b"-----"))
    what = draw.choice([b"PRIVATE KEY", b"PUBLIC KEY", b"RSA PRIVATE KEY", b"ENCRYPTED PRIVATE KEY"])
    inside = base64.b64encode(damaged_bytes(base64.b64decode(body), draw))
    return b"-----BEGIN %s-----\n%s\n-----END %s-----\n" % (what, inside, what)


_INSIDE: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    ".pt": _zip, ".npz": _zip, ".png": _png, ".key": _pem, ".pub": _pem,
}  # fmt: skip


def restructured(name: str, content: bytes, draw: random.Random) -> bytes:
    """A file of the same format that holds something else; with damaged bytes if there is none.

    Args:
        name: of the file, which says its format.
        content: a valid file.
        draw: source of random numbers.
    """
    ending = Path(name).suffix
    try:
        if ending in _INSIDE and (ending not in _FORMATS or _chance(draw, 50)):
            return _INSIDE[ending](content, draw)
        read, write = _FORMATS[ending]
        return write(replaced(read(content), draw, STRANGE + _TAR if ending == ".tar" else STRANGE))
    except Exception:  # no such format, or one that cannot hold the change
        return damaged_bytes(content, draw)


# --- folders --------------------------------------------------------------------------------------------------------
@cache
def valid(kind: Kind) -> Folder:
    """The valid example of a kind, made once in a process."""
    return kind.valid()


def damaged(kind: Kind, draw: random.Random) -> Damaged:
    """A valid folder in which a few files are damaged, exchanged, missing, or no regular files."""
    found = Damaged(valid(kind))
    repair = kind.repaired if kind.repaired is not None and _chance(draw, 60) else None
    for _ in range(1 if len(found) == 1 else draw.randint(1, kind.most)):
        # Most folders have many images and few files that describe them.
        endings = sorted({Path(name).suffix for name in found})
        if not endings:
            break
        ending = draw.choice(endings)
        name = draw.choice(sorted(name for name in found if Path(name).suffix == ending))
        content, chance = found[name], draw.randrange(100)
        if isinstance(content, Special) or chance < 5:
            _change_place(found, name, draw)
        else:
            changed = restructured(name, content, draw) if chance < 50 else damaged_bytes(content, draw)
            found[name] = changed if repair is None else repair(name, changed)
    return found


def _change_place(found: Damaged, name: str, draw: random.Random) -> None:
    other = draw.choice(sorted(found))
    match draw.randrange(5):
        case 0 if len(found) > 1:
            del found[name]
        case 1:
            found[name] = found[other]
        case 2:
            content = found.pop(name)
            found[
                str(Path(name).with_name(draw.choice(["é", "x", " ", "a\nb", "-", "\udcff"]) + Path(name).suffix))
            ] = content
        case 3:
            found[name] = b""
        case _:
            special = draw.choice(_SPECIALS)
            found[name] = Special("link", Path(name).name) if special.target == "self" else special


def write(folder: Path, content: Folder) -> None:
    """Write the files of a folder in place of what is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, held in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(held, bytes):
            path.write_bytes(held)
        elif held.what == "folder":
            path.mkdir()
        elif held.what == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(held.target)


def files_of(make: Callable[[Path], object], *chosen: str) -> dict[str, bytes]:
    """The files that a function writes into a folder: all, or those below the chosen paths."""
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        root = Path(name)
        make(root)
        paths = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
        return {at: path.read_bytes() for at, path in paths.items() if not chosen or at.startswith(chosen)}


# --- strategies -----------------------------------------------------------------------------------------------------
@st.composite
def folders(draw: st.DrawFn, kind: Kind) -> Damaged:
    """Damaged folders of a kind."""
    return damaged(kind, draw(st.randoms()))


def read_damaged(kind: Kind, content: Folder, place: Path) -> str:
    """Read a damaged folder; returns the outcome.

    Args:
        kind: of the files.
        content: of the folder.
        place: where it is written.

    Raises:
        AssertionError: the refusal has several lines.
        Exception: any other exception of the reader.
    """
    write(place, content)
    try:
        kind.read(place)
    except InputError as error:
        assert "\n" not in str(error), f"a refusal of several lines: {error}"
        return "refused"
    return "read"
