"""Digests of a finished run's files, which the coordinator notes in its signed log before the log ends."""

from __future__ import annotations

import hashlib
import json

from fedmq.runs.results import read_summary
from fedmq.storage.regular_files import open_regular
from fedmq.storage.run_folder import RunFolder

#: Files of a run folder that nothing changes after the run has ended, unless it is resumed or extended.
FILES = (
    "scenario.yaml",
    "agreement.json",
    "metrics.jsonl",
    "model/config.json",
    "model/model.safetensors",
    "model/README.md",
)
SUMMARY = "summary.json"
_BLOCK = 1 << 20  # bytes per read
#: Keys of a summary that the command completes after the coordinator has ended: real times, and memory.
_COMPLETED_LATER = {"seconds", "processes"}


def result_digest(folder: RunFolder, name: str) -> str:
    """SHA-256 (hex) of a file, of the summary without real times and memory.

    Args:
        folder: the run folder.
        name: one of ``FILES``, or ``SUMMARY``.

    Raises:
        InputError: it cannot be read.
    """
    if name != SUMMARY:
        with open_regular(folder.root / name, "a file of a finished run") as file:
            hashed = hashlib.sha256()
            while block := file.read(_BLOCK):
                hashed.update(block)
            return hashed.hexdigest()
    summary = read_summary(folder)
    plain = summary.plain()
    kept = {key: value for key, value in plain.items() if key not in _COMPLETED_LATER}
    kept["virtual"] = summary.seconds.virtual
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def result_digests(folder: RunFolder) -> dict[str, str]:
    """The digests of all files of a finished run that are there, by name."""
    return {name: result_digest(folder, name) for name in (*FILES, SUMMARY) if (folder.root / name).is_file()}
