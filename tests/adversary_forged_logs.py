"""What a forger of message logs does who knows their format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedmq.wire.log_records import GENESIS, canonical, chain


def lines(run: Path, process: str) -> list[str]:
    return (run / "messages" / f"{process}.jsonl").read_text().splitlines()


def rewrite(run: Path, process: str, content: Iterable[str]) -> None:
    (run / "messages" / f"{process}.jsonl").write_text("".join(line + "\n" for line in content))


def reseal(content: Iterable[str]) -> list[str]:
    """A new chain over the edited records."""
    head, result = GENESIS, []
    for number, line in enumerate(content):
        record = {**json.loads(line), "n": number, "previous": head}
        del record["hash"]
        record["hash"] = head = chain(head, record)
        result.append(canonical(record).decode())
    return result


def forge(run: Path, process: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the records of a log, or remove those that become None, and chain it anew."""
    changed = (change(json.loads(line)) for line in lines(run, process))
    rewrite(run, process, reseal(json.dumps(record) for record in changed if record is not None))
