"""The documentation site: it builds without a warning, holds every page, and loads nothing from other servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def _pages(nav: object) -> set[str]:
    match nav:
        case str(page):
            return {page}
        case dict() | list():
            parts = nav.values() if isinstance(nav, dict) else nav
            return set().union(*map(_pages, parts))
    raise AssertionError(nav)


def test_every_page_but_those_of_results_is_in_the_navigation() -> None:
    listed = _pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == {page for page in pages if not page.startswith("results/")} | {"results/README.md"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert loaded == [], page
    assert (tmp_path / "site" / "search").is_dir()
