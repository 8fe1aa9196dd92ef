"""Audit randomly damaged run folders: none may crash the audit or take more than two seconds of processor time.

    python -m benchmarks.fuzz_audit --run runs/smoke --folders 10000

Each folder is a copy of a run, in which about ten files are mutated: bytes flipped, lines removed, repeated or swapped,
JSON values replaced, files cut or exchanged. Prints the outcomes and the slowest folder, and the seed of every folder
that failed. 10,000 folders are about 100,000 mutated files.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from benchmarks.fuzz_damage import replaced
from fedmq.audit import report
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import Evidence, verdict
from fedmq.errors import InputError
from fedmq.wire.log_records import GENESIS, canonical, chain

_LIMIT_SECONDS = 2.0
_FILES = 10


def _line(line: bytes, draw: random.Random) -> bytes:
    try:
        return json.dumps(replaced(json.loads(line), draw), sort_keys=True, separators=(",", ":")).encode() + b"\n"
    except ValueError:
        return line[: draw.randrange(len(line) + 1)] + b"\n"


def _chained(lines: list[bytes]) -> list[bytes]:
    """The records with a valid chain, so that the checks behind it are reached."""
    head, result = GENESIS, []
    for number, line in enumerate(lines):
        try:
            record = {**json.loads(line), "n": number, "previous": head}
            record.pop("hash", None)
            head = chain(head, record)
            result.append(canonical(record | {"hash": head}) + b"\n")
        except (ValueError, TypeError, UnicodeError):
            result.append(line)
    return result


def _mutate(path: Path, draw: random.Random) -> None:
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True) or [b""]
    place = draw.randrange(len(lines))
    match draw.randrange(8):
        case 0:
            flipped = bytearray(raw or b"x")
            for _ in range(draw.randint(1, 20)):
                flipped[draw.randrange(len(flipped))] = draw.randrange(256)
            path.write_bytes(flipped)
            return
        case 1:
            path.write_bytes(raw[: draw.randrange(len(raw) + 1)])
            return
        case 2:
            path.write_bytes(raw + bytes(draw.randrange(256) for _ in range(draw.randint(1, 300))))
            return
        case 3:
            del lines[place]
        case 4:
            lines.insert(draw.randrange(len(lines)), lines[place])
        case 5:
            other = draw.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
        case _:
            if path.suffix == ".jsonl":
                for each in {draw.randrange(len(lines)) for _ in range(draw.randint(1, 5))}:
                    lines[each] = _line(lines[each], draw)
            elif path.suffix == ".json":
                lines = [_line(raw, draw)]
    if path.parent.name == "messages" and draw.random() < 0.7:
        lines = _chained(lines)
    path.write_bytes(b"".join(lines))


def mutated(folder: Path, draw: random.Random) -> int:
    """Mutate files of a run folder in place; returns their number."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    chosen = draw.choices(files, k=draw.randint(1, 2 * _FILES - 1))
    for path in chosen:
        if path.exists():
            _mutate(path, draw)
    match draw.randrange(12):
        case 0:
            draw.choice(files).unlink()
        case 1:
            one, other = draw.sample(files, 2)
            one.write_bytes(other.read_bytes())
        case _:
            pass
    return len(chosen)


def _outcome(folder: Path) -> str:
    try:
        audit = audit_run(folder)
        sentences = verdict(audit, Evidence())
        json.dumps(audit.to_plain())
        report.page(folder, audit, sentences)
        report.table(folder, audit)
    except InputError as error:
        return "one clear line" if "\n" not in str(error) else "several lines"
    return "findings" if audit.findings else "no findings"


def main() -> int:
    """Run the command line; 1 if a folder crashed the audit or took too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folders", type=int, default=10_000, help="number of folders")
    parser.add_argument("--seed", type=int, default=0, help="of the first folder")
    parser.add_argument("--run", type=Path, required=True, help="the run folder to copy")
    options = parser.parse_args()
    outcomes, files, slowest, failed = Counter[str](), 0, (0.0, 0), 0
    with tempfile.TemporaryDirectory() as place:
        for seed in range(options.seed, options.seed + options.folders):
            folder = Path(shutil.copytree(options.run, Path(place) / str(seed)))
            files += mutated(folder, random.Random(seed))
            began, used = time.monotonic(), time.process_time()
            try:
                outcome = _outcome(folder)
            except Exception:
                outcome = "crash"
                traceback.print_exc()
            # Other work on this machine does not count, unless the audit blocks.
            seconds, waited = time.process_time() - used, time.monotonic() - began
            slowest = max(slowest, (seconds, seed))
            if outcome in ("crash", "several lines") or seconds > _LIMIT_SECONDS or waited > 10 * _LIMIT_SECONDS:
                failed += 1
                print(f"seed {seed}: {outcome}, {seconds:.2f} s", flush=True)
            outcomes[outcome] += 1
            shutil.rmtree(folder)
    print(f"{options.folders} folders, {files} mutated files: {dict(outcomes)}; "
          f"slowest {slowest[0]:.2f} s (seed {slowest[1]})")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
