"""Hook of ``mkdocs``: the language of each indented block of code, by its first line, so that the site colours it."""

from __future__ import annotations

import re
from typing import Any

_LANGUAGES = {
    "console": re.compile(r"\$ "),
    "bash": re.compile(r"(fedmq|make|pip|ray|[A-Z_]+=\S+) "),
    "python": re.compile(r'"""|(import|from|class|def|case) |@|np\.'),
    "toml": re.compile(r"\[[\w.\"-]+\]$"),
    "yaml": re.compile(r"(- )?[{\w]+: ?\S*"),
}
_BLOCK = re.compile(r"(?<=\n\n)((?: {4}.*\n(?:\n+(?= {4}))?)+)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its indented blocks fenced and named."""
    return _BLOCK.sub(_fenced, markdown)


def _fenced(block: re.Match[str]) -> str:
    code = re.sub(r"^ {4}", "", block[1], flags=re.MULTILINE).rstrip("\n")
    language = next((name for name, first in _LANGUAGES.items() if first.match(code)), "text")
    return f"```{language}\n{code}\n```\n"
