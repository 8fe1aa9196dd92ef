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
from pathlib import Path
from typing import Any, Literal

import h5py  # type: ignore[import-untyped]
import numpy as np
import pyarrow
import pyarrow.parquet
import scipy.io
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
    """Plain data in which one part is removed, repeated, nested or replaced by one of some strange values."""
    if isinstance(value, dict) and value and _chance(draw, 88):
        key = draw.choice(list(value))
        match draw.randrange(10):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return value | {f"{key}x": value[key]}
        return value | {key: replaced(value[key], draw, strange)}
    if isinstance(value, list) and value and _chance(draw, 82):
        place = draw.randrange(len(value))
        match draw.randrange(10):
            case 0:
                return [*value[:place], *value[place + 1 :]]
            case 1:
                return [*value, *value[place:]] * draw.randint(1, 40)
        return [*value[:place], replaced(value[place], draw, strange), *value[place + 1 :]]
    if _chance(draw, 2):
        nested: Any = value
        for _ in range(draw.randint(10, 600)):
            nested = [nested]
        return nested
    return draw.choice(strange)


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _json(content: bytes, draw: random.Random) -> bytes:
    return _text(json.dumps(replaced(json.loads(content), draw), ensure_ascii=_chance(draw, 50)))


def _lines(content: bytes, draw: random.Random) -> bytes:
    """Lines removed, repeated, exchanged, or changed by the format that they have."""
    lines = content.split(b"\n")
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(5):
        case 0:
            del lines[one]
        case 1:
            lines.insert(other, lines[one])
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
        case 3:
            lines[one] = draw.choice(_TEXTS)
        case _:
            lines[one] = _json(lines[one], draw)
    return b"\n".join(lines)


def _yaml(content: bytes, draw: random.Random) -> bytes:
    return _text(yaml.safe_dump(replaced(yaml.safe_load(content), draw), sort_keys=False, allow_unicode=True))


def _csv(content: bytes, draw: random.Random) -> bytes:
    text = content.decode()
    tabs = {"delimiter": "\t"} if "\t" in text.partition("\n")[0] else {}
    rows = list(csv.reader(io.StringIO(text), **tabs))  # type: ignore[arg-type]
    column = draw.randrange(len(rows[0]))
    match draw.randrange(4):
        case 0:
            draw.choice(rows)[column] = str(draw.choice(STRANGE))
        case 1:
            rows = [[*row[:column], *row[column + 1 :]] for row in rows]
        case 2:
            rows = [[*row, row[column]] for row in rows]
        case _:
            rows[0][column] = draw.choice(["image", "title", "caption", "labels", "split", "key", "", "file_name"])
    made = io.StringIO()
    csv.writer(made, **tabs).writerows(rows)  # type: ignore[arg-type]
    return _text(made.getvalue())


def _safetensors(content: bytes, draw: random.Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = _json(content[8 : 8 + size], draw)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _array(value: np.ndarray, draw: random.Random) -> Any:
    """An array of another dtype or shape, or with other values."""
    match draw.randrange(8):
        case 0:
            return value.astype(draw.choice(_DTYPES))
        case 1:
            return value.reshape(-1)
        case 2:
            return value[: draw.randint(0, len(value))]
        case 3:
            return np.concatenate([value, value])
        case 4:
            return value[..., None]
        case 5:
            return np.full(value.shape, draw.choice([np.nan, np.inf, -1, 0, 1e30]))
        case 6:
            return np.array(draw.choice([0, "x", np.nan]))
        case _:
            return np.transpose(value)


def _arrays(arrays: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    name = draw.choice(list(arrays))
    if _chance(draw, 10):
        del arrays[name]
        return arrays
    if _chance(draw, 10):
        return {draw.choice(["image", "text", "x", "label", "IAll"]) if key == name else key: each
                for key, each in arrays.items()}  # fmt: skip
    return arrays | {name: _array(np.asarray(arrays[name]), draw)}


def _npz(content: bytes, draw: random.Random) -> bytes:
    made = io.BytesIO()
    if _chance(draw, 50):
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            np.savez(made, **_arrays(dict(stored), draw))
        return made.getvalue()
    return _zip(content, draw)


def _npy(content: bytes, draw: random.Random) -> bytes:
    made = io.BytesIO()
    np.save(made, _array(np.load(io.BytesIO(content), allow_pickle=False), draw), allow_pickle=False)
    return made.getvalue()


def _zip(content: bytes, draw: random.Random) -> bytes:
    """A damaged member, with the right checksum, so that what it holds is reached."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    name = draw.choice(list(members))
    with zipfile.ZipFile(made, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as written:
        for each, inside in members.items():
            written.writestr(each, damaged_bytes(inside, draw) if each == name else inside)
    return made.getvalue()


def _mat(content: bytes, draw: random.Random) -> bytes:
    stored = {key: each for key, each in scipy.io.loadmat(io.BytesIO(content)).items() if not key.startswith("__")}
    made = io.BytesIO()
    scipy.io.savemat(made, _arrays(stored, draw), do_compression=_chance(draw, 50))
    return made.getvalue()


def _hdf5(content: bytes, draw: random.Random) -> bytes:
    with h5py.File(io.BytesIO(content)) as opened:
        stored = {name: opened[name][()] for name in opened}
    made = io.BytesIO()
    with h5py.File(made, "w") as written:
        for name, each in _arrays(stored, draw).items():
            written[name] = each
    return made.getvalue()


def _table(content: bytes, draw: random.Random, ending: str) -> bytes:
    as_parquet = ending == ".parquet"
    table = (
        pyarrow.parquet.read_table(io.BytesIO(content)) if as_parquet else pyarrow.ipc.open_stream(content).read_all()
    )
    columns = table.to_pydict()
    if _chance(draw, 30):
        name = draw.choice(list(columns))
        columns = {draw.choice(["image", "text", "split", "labels", "x"]) if key == name else key: each
                   for key, each in columns.items()}  # fmt: skip
    changed, made = pyarrow.table(replaced(columns, draw)), io.BytesIO()
    if as_parquet:
        pyarrow.parquet.write_table(changed, made, row_group_size=draw.choice([1, 2, 1000]))
    else:
        with pyarrow.ipc.new_stream(made, changed.schema) as writer:
            writer.write_table(changed, max_chunksize=draw.choice([1, 2, 1000]))
    return made.getvalue()


def _tar(content: bytes, draw: random.Random) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(content)) as opened:
        members = [(each, opened.extractfile(each).read()) for each in opened]  # type: ignore[union-attr]
    chosen, made = draw.randrange(len(members)), io.BytesIO()
    info, inside = members[chosen]
    match draw.randrange(6):
        case 0:
            del members[chosen]
        case 1:
            info.name = draw.choice(["../x.png", "/x.png", "x", "a.b.c.json", "é.txt", ".", "x.png/y.txt", "x" * 5000])
        case 2:
            info.type = draw.choice([tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, b"S", b"Z"])
        case 3:
            info.pax_headers = {
                draw.choice(["size", "path", "GNU.sparse.map"]): draw.choice(["9" * 30, "-1", "x", "1,2"])
            }
        case 4:
            members.append(members[chosen])
        case _:
            changed = restructured(info.name, inside, draw)
            info.size, members[chosen] = len(changed), (info, changed)
    with tarfile.open(fileobj=made, mode="w", format=draw.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])) as written:
        for each, held in members:
            written.addfile(each, io.BytesIO(held))
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


_FORMATS: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": _json, ".request": _json, ".jsonl": _lines, ".journal": _lines, ".txt": _lines, ".list": _lines,
    ".eng": _lines, ".xml": _lines, ".csv": _csv, ".tsv": _csv, ".yaml": _yaml,
    ".safetensors": _safetensors, ".npz": _npz, ".npy": _npy, ".pt": _zip, ".mat": _mat, ".h5": _hdf5,
    ".parquet": lambda content, draw: _table(content, draw, ".parquet"),
    ".arrow": lambda content, draw: _table(content, draw, ".arrow"),
    ".tar": _tar, ".png": _png, ".key": _pem, ".pub": _pem,
}  # fmt: skip


def restructured(name: str, content: bytes, draw: random.Random) -> bytes:
    """A file of the same format that holds something else; with damaged bytes if there is none.

    Args:
        name: of the file, which says its format.
        content: a valid file.
        draw: source of random numbers.
    """
    try:
        return _FORMATS[Path(name).suffix](content, draw)
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
