"""The documentation site that ``make docs`` builds: no warning, and what a reader needs on every page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.code_languages import on_page_markdown

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_make_docs_builds_a_site_of_its_own_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    site = tmp_path / "site"
    done = subprocess.run(
        ["make", "-o", ".venv/installed", "docs", f"BIN={Path(sys.executable).parent}", f"SITE={site}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert loaded == [], name
        assert "mermaid" not in text, "drawn by a script of another server"
        # The sections, and the pages of the section that is open.
        links = re.findall(r'class="md-tabs__link".*?</a>|<a href="([^"]+)" class="md-nav__link', text, re.DOTALL)
        assert name == "404.html" or len(links) > 10, name
    assert 'src="images/overview.svg"' in pages["index.html"]
    assert (site / "images" / "overview.svg").is_file()
    coloured = pages["howto/own_methods.html"]
    assert '<span class="k">class</span><span class="w"> </span><span class="nc">Half</span>' in coloured
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"] if "dropout" in entry["text"]}
    assert "reference/glossary.html" in found


@pytest.mark.parametrize(
    ("code", "language"),
    [
        ("fedmq data list", "bash"),
        ("$ fedmq data list", "console"),
        ('"""A method."""\n\n\nclass Half:\n    pass', "python"),
        ("faults:\n  - {kind: drop}", "yaml"),
        ("- {kind: drop}", "yaml"),
        ("name: two\nrounds: 3", "yaml"),
        ("round 12/200  silos: 1 training", "text"),
    ],
)
def test_an_indented_block_gets_its_language(code: str, language: str) -> None:
    page = "Run it:\n\n" + "".join(f"    {line}\n" if line else "\n" for line in code.split("\n")) + "\nThen look.\n"
    assert on_page_markdown(page) == f"Run it:\n\n```{language}\n{code}\n```\n\nThen look.\n"
