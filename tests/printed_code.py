"""The code that a document prints: the indented blocks under each heading."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
EXTENDING = sorted((ROOT / "docs" / "howto" / "extend").glob("*.md"))


class Block(NamedTuple):
    """A block of code without its indentation, and the paragraph above it on one line."""

    intro: str
    code: str


def blocks(page: Path, heading: str) -> list[Block]:
    """The blocks of code under a heading of the second level."""
    _, found, below = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert found, f"{page.name} has no section {heading}"
    parts = re.split(r"((?:^    .*\n(?:\n+(?=    ))?)+)", below.partition("\n## ")[0], flags=re.MULTILINE)
    return [
        Block(" ".join(intro.strip().rpartition("\n\n")[2].split()), textwrap.dedent(code))
        for intro, code in zip(parts[::2], parts[1::2], strict=False)
    ]


def file_under(page: Path, heading: str) -> str:
    """The file that a document prints under a heading: the first block that begins with a docstring."""
    return next(block.code for block in blocks(page, heading) if block.code.startswith('"""'))


def recipe(heading: str) -> Path:
    """The page about extending fedmq that has a heading."""
    (page,) = [page for page in EXTENDING if f"\n## {heading}\n" in page.read_text(encoding="utf-8")]
    return page
