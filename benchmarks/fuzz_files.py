"""Damaged data and scenario files: ``python -m benchmarks.fuzz_files [--files N] [--seed N] [--keep DIR]``.

Each file is a valid one with random damage. A reader may return or raise ``InputError``; any other exception, a reader
that takes more than :data:`HANG_S`, memory of more than :data:`MEMORY_MB` above that of valid files, and a process that
dies are failures. The same seed makes the same files.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import h5py  # type: ignore[import-untyped]
import numpy as np
import safetensors.numpy
import scipy.io
from rich.console import Console
from rich.table import Table

from fedmq.config import loader
from fedmq.config.scenario import Data
from fedmq.data.readers.arrays import read_arrays
from fedmq.data.readers.features import read_features
from fedmq.data.readers.manifest import read_manifest
from fedmq.errors import InputError
from fedmq.seeds import numpy_generator

HANG_S = 2.0
MEMORY_MB = 200
#: Processor time after which a reader is interrupted [s].
_GIVEN_UP_S = 10
_FILES = 100_000


# --- valid files ----------------------------------------------------------------------------------------------------
def _arrays() -> dict[str, np.ndarray]:
    generator = numpy_generator(0, "fuzz", "arrays")
    return {
        "image": generator.normal(size=(12, 4)).astype(np.float32),
        "text": generator.normal(size=(12, 3, 5)).astype(np.float32),
        "labels": np.arange(12) % 3,
        "captions": np.array([1, 2, 3] * 4),
        "split": np.array([0] * 8 + [1, 2, 2, 2]),
    }


@cache
def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, **_arrays(), keys=np.array([f"k{row}" for row in range(12)]))  # type: ignore[arg-type]
    return file.getvalue()


def _compressed() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **_arrays())  # type: ignore[arg-type]
    return file.getvalue()


def _safetensors() -> bytes:
    saved: bytes = safetensors.numpy.save(_arrays(), {"label_names": json.dumps(["a", "b", "c"])})
    return saved


def _parts() -> dict[str, np.ndarray]:
    given = _arrays()
    return {"IAll": given["image"], "YAll": given["text"][:, 0], "LAll": np.eye(3)[given["labels"]]}


def _mat(*, compressed: bool) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, _parts(), do_compression=compressed)
    return file.getvalue()


def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, _arrays()["labels"])
    return file.getvalue()


def _npz_with(member: bytes) -> bytes:
    file = io.BytesIO(_npz())
    with zipfile.ZipFile(file) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        for name, content in {**members, "labels.npy": member}.items():
            opened.writestr(name, content)
    return made.getvalue()


def _hdf5() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        for name, value in _parts().items():
            opened[name] = value
    return file.getvalue()


def _csv() -> bytes:
    lines = ["image,captions,labels,split"]
    lines += [f"{row}.png,\"one|a dog, {row}\",\"['a', 'b']\",{'train' if row < 6 else 'test'}" for row in range(9)]
    return "\n".join(lines).encode()


def _jsonl() -> bytes:
    items = [
        {"image": f"{row}.png", "captions": ["a", f"b {row}"], "labels": ["x"], "split": "train" if row < 6 else "test"}
        for row in range(9)
    ]
    return "\n".join(map(json.dumps, items)).encode()


def _yaml() -> bytes:
    return b"""name: fuzz
rounds: 3
protocol: {name: rcsr, filler: zero}
data: {name: openmoji}
silos: &silos {count: 4}
partition: {kind: dir_clusters, alpha: 0.5, clusters: 10}
training: {learning_rate: 1.0e-3, batch_size: 16}
missing_modality: {silos: {silo-00: image, silo-01: text}}
faults:
  - {kind: drop, share: 0.1}
  - {kind: late, silos: [silo-02], seconds: 3}
"""


@dataclass(frozen=True)
class Kind:
    """One kind of files.

    Args:
        ending: of the file's name.
        valid: makes a valid file.
        read: the reader.
        wrap: makes the file of what is damaged, e.g. an archive with right checksums.
    """

    ending: str
    valid: Callable[[], bytes]
    read: Callable[[Path], object]
    wrap: Callable[[bytes], bytes] = bytes


def _read_parts(path: Path) -> object:
    return read_arrays(Data(name="mirflickr", path=path, queries=2, train=4))


KINDS: Mapping[str, Kind] = {
    "npz": Kind(".npz", _npz, read_features),
    "compressed npz": Kind(".npz", _compressed, read_features),
    "safetensors": Kind(".safetensors", _safetensors, read_features),
    "array in npz": Kind(".npz", _npy, read_features, _npz_with),
    "mat": Kind(".mat", partial(_mat, compressed=False), _read_parts),
    "compressed mat": Kind(".mat", partial(_mat, compressed=True), _read_parts),
    "hdf5": Kind(".h5", _hdf5, _read_parts),
    "csv": Kind(".csv", _csv, lambda path: read_manifest(Data(name="manifest", path=path))),
    "jsonl": Kind(".jsonl", _jsonl, lambda path: read_manifest(Data(name="manifest", path=path))),
    "yaml": Kind(".yaml", _yaml, loader.load),
}

# --- damage ---------------------------------------------------------------------------------------------------------
_NUMBERS = [0, 1, -1, 127, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1]
_TEXTS = [
    b"", b"nan", b"-1", b"1e999", b"9" * 5000, b"[", b"{", b"'", b'"', b"*a", b"&a ", b"!!python/object:os.system ",
    b"\x00", b"\xff", b"\xed\xa0\x80", b"\\ud83d", b"|", b",", b"\n", b"\r", b": ", b"- ", b"<<", b"true",
    b"[" * 3000, b"['a', 'b']", b"../../etc/passwd", b"/dev/zero", "\u202e\u2028".encode(), b"A" * 20_000,
]  # fmt: skip


def damaged(content: bytes, generator: np.random.Generator) -> bytes:
    """A copy of a file with one to four random changes."""
    data = bytearray(content)
    for _ in range(int(generator.integers(1, 5))):
        at = int(generator.integers(len(data) + 1))
        end = min(len(data), at + int(generator.integers(1, 1 + max(1, len(data) // 4))))
        match int(generator.integers(9)):
            case 0:
                data[at : at + 1] = bytes([int(generator.integers(256))])
            case 1:
                data[at : at + 1] = bytes([data[at] ^ 1 << int(generator.integers(8))]) if at < len(data) else b""
            case 2:
                del data[at:]
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end] * int(generator.integers(1, 4))
            case 5:
                width = int(generator.choice([1, 2, 4, 8]))
                number = _NUMBERS[int(generator.integers(len(_NUMBERS)))] % (1 << 8 * width)
                data[at : at + width] = number.to_bytes(width, generator.choice(["little", "big"]))
            case 6:
                data[at:at] = _TEXTS[int(generator.integers(len(_TEXTS)))]
            case 7:
                other = int(generator.integers(len(data) + 1))
                data[at:end] = data[other : other + (end - at)]
            case _:
                numbers = list(re.finditer(rb"\d+", data))
                if numbers:
                    found = numbers[int(generator.integers(len(numbers)))]
                    data[slice(*found.span())] = str(_NUMBERS[int(generator.integers(len(_NUMBERS)))]).encode()
    return bytes(data)


# --- trials ---------------------------------------------------------------------------------------------------------
@dataclass
class Tally:
    """Results of one kind of files.

    Args:
        outcomes: how often files were read, refused, and failed.
        slowest: longest time of a reader [s].
        memory: largest memory above that of valid files [MB].
        failures: number of a file, and how it failed.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    memory: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)


class _TooLong(BaseException):
    """The reader was interrupted; no reader catches it."""


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLong


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def content_of(kind: str, seed: int, number: int) -> bytes:
    """The damaged file of a number."""
    made = KINDS[kind]
    return made.wrap(damaged(made.valid(), numpy_generator(seed, "fuzz", kind, number)))


def _try_all(line: Connection, kind: str, seed: int, numbers: Sequence[int], folder: Path) -> None:
    """Read the damaged files of some numbers in this process; reports each before and after."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGVTALRM, _interrupt)
    path, read = folder / f"damaged{KINDS[kind].ending}", KINDS[kind].read
    path.write_bytes(KINDS[kind].wrap(KINDS[kind].valid()))
    for _ in range(3):
        read(path)
    baseline = _peak_mb()
    for number in numbers:
        line.send(number)
        path.write_bytes(content_of(kind, seed, number))
        outcome, started = "read", time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, _GIVEN_UP_S)
        try:
            read(path)
        except InputError as error:
            outcome = "refused" if "\n" not in str(error) else "a message of several lines"
        except _TooLong:
            outcome = "hang"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"[:200]
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        line.send((outcome, time.process_time() - started, _peak_mb() - baseline))
    line.send(None)


def fuzz(kind: str, files: int, seed: int) -> Tally:
    """Read damaged files of one kind, in a process that is replaced if it dies or grows.

    Args:
        kind: one of :data:`KINDS`.
        files: number of files.
        seed: of the damage.
    """
    tally, done, context = Tally(), 0, multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        while done < files:
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, kind, seed, range(done, files), Path(name))
            process = context.Process(target=_try_all, args=arguments)
            process.start()
            theirs.close()
            number: int | None = None
            try:
                while (number := ours.recv()) is not None:
                    done = number + 1
                    outcome, seconds, memory = ours.recv()
                    _count(tally, number, outcome, seconds, memory)
                    if memory > MEMORY_MB:
                        break  # the peak never falls
            except EOFError:
                process.join()
                if number is None:
                    raise RuntimeError(f"{kind}: the valid file was not read") from None
                _count(tally, done - 1, f"the process died with {process.exitcode}", 0.0, 0.0)
            process.kill()
            process.join()
            ours.close()
    return tally


def _count(tally: Tally, number: int, outcome: str, seconds: float, memory: float) -> None:
    tally.slowest, tally.memory = max(tally.slowest, seconds), max(tally.memory, memory)
    problems = [] if outcome in ("read", "refused") else [outcome]
    problems += [f"{seconds:.1f} s"] if seconds > HANG_S else []
    problems += [f"{memory:.0f} MB above valid files"] if memory > MEMORY_MB else []
    tally.outcomes["failed" if problems else outcome] += 1
    if problems:
        tally.failures.append((number, ", ".join(problems)))


def main() -> None:
    """Fuzz every kind, print what was found, and exit with 1 if a file failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_files", description=__doc__)
    parser.add_argument("--files", type=int, default=_FILES, help=f"number of files of all kinds; default {_FILES}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write files that failed to this folder")
    arguments = parser.parse_args()
    console, started = Console(width=120), time.perf_counter()
    table = Table("kind", "files", "read", "refused", "failed", "slowest s", "MB above valid files")
    failed = 0
    for kind in KINDS:
        tally = fuzz(kind, -(-arguments.files // len(KINDS)), arguments.seed)
        counts = [str(tally.outcomes[name]) for name in ("read", "refused", "failed")]
        figures = [f"{tally.slowest:.2f}", f"{tally.memory:.0f}"]
        table.add_row(kind, str(sum(tally.outcomes.values())), *counts, *figures)
        failed += len(tally.failures)
        for number, problem in tally.failures[:5]:
            console.print(f"{kind} {number}: {problem}", highlight=False, markup=False, soft_wrap=True)
        for number, _ in tally.failures if arguments.keep else ():
            arguments.keep.mkdir(parents=True, exist_ok=True)
            name = f"{kind.replace(' ', '_')}-{number}{KINDS[kind].ending}"
            (arguments.keep / name).write_bytes(content_of(kind, arguments.seed, number))
    console.print(table)
    console.print(f"seed {arguments.seed}, {time.perf_counter() - started:.0f} s, {failed} failures")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
