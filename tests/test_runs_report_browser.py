"""The report in a browser: no error, every figure drawn, no sideways scrolling, zoom, light and dark, and print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedmq.api.results import write_report
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import Evidence, verdict
from fedmq.audit.report import write_report as write_audit
from fedmq.runs.report.html import Figure, document
from fedmq.runs.report.run_report import side_by_side
from fedmq.storage.run_folder import RunFolder
from tests.threaded_run import resolved, run
from tests.waiting import PATIENCE

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a finished run."""
    root = tmp_path_factory.mktemp("browser") / "run"
    run(resolved(tiny), root)
    write_report(RunFolder(root), None)
    return RunFolder(root).report


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("no chromium installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, report: Path, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    """The report's page at a width, and the errors that it reports."""
    page, errors = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme), list[str]()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else errors.append(request.url)
    )
    page.set_default_timeout(PATIENCE * 1000)  # on a busy machine Chromium needs more than Playwright's 30 s
    page.goto(report.as_uri())
    page.wait_for_function("[...document.querySelectorAll('.canvas')].every(each => each.querySelector('.main-svg'))")
    return page, errors


@pytest.mark.parametrize("width", [390, 1280])
def test_every_figure_is_drawn_at_every_width_without_scrolling_sideways(
    browser: Any, report: Path, width: int
) -> None:
    page, errors = opened(browser, report, width)
    assert errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("[...document.querySelectorAll('.canvas')].map(each => each.data.length)")
    assert len(drawn) >= 8
    assert min(drawn) >= 1
    # A table that is wider than the window scrolls in its own box, whose shadow shows that there is more.
    shaded = """[...document.querySelectorAll('.wide')].every(box => {
        const style = getComputedStyle(box);
        return style.overflowX === 'auto' && style.backgroundImage.includes('gradient');})"""
    assert page.evaluate(shaded)
    rows = "[...document.querySelectorAll('.wide tr')].map(row => row.getBoundingClientRect().height)"
    assert max(page.evaluate(rows)) < (190 if width < 600 else 90), "a wide table's row is a card on a narrow screen"
    missing = "[...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.getAttribute('href')))"
    assert page.evaluate(f"{missing}.length") == 0
    sections = "[...document.querySelectorAll('h2')].filter(h => !document.querySelector(`nav a[href='#${h.id}']`))"
    assert page.evaluate(f"{sections}.length") == 0
    # The toolbar never covers a title: titles stand outside the drawing.
    overlaps = """[...document.querySelectorAll('figure.plot')].filter(figure => {
        const bar = figure.querySelector('.modebar'), head = figure.querySelector('h3').getBoundingClientRect();
        return bar && bar.getBoundingClientRect().top < head.bottom - 1;}).length"""
    assert page.evaluate(overlaps) == 0
    page.close()


def test_the_page_follows_the_dark_theme_and_prints_in_the_light_one(browser: Any, report: Path) -> None:
    page, errors = opened(browser, report, 1280, "dark")
    ink = "getComputedStyle(document.querySelector('.canvas .xtick text')).fill"
    assert page.evaluate(ink) == "rgb(228, 233, 238)"
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(f"{ink} === 'rgb(28, 39, 51)'")
    page.emulate_media(media="print")
    assert len(page.pdf()) > 20_000
    assert errors == []
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_audit_and_side_by_side_pages_fit_the_window_in_both_themes(
    browser: Any, report: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    audit, run = audit_run(report.parent), RunFolder(report.parent)
    write_audit(audit, verdict(audit, Evidence()), tmp_path)
    other = RunFolder(Path(shutil.copytree(report.parent, tmp_path / "smoke-rcsr-seed1-5b3bea0f8032")))
    (tmp_path / "both.html").write_text(side_by_side([run, other]))
    for name in ("audit.html", "both.html"):
        page, errors = opened(browser, tmp_path / name, width, scheme)
        assert errors == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = "[...document.querySelectorAll('.wide')].filter(each => each.scrollWidth > each.clientWidth).length"
        assert page.evaluate(cut) == 0, name
        paper = "getComputedStyle(document.body).backgroundColor"
        assert (page.evaluate(paper) == "rgb(255, 255, 255)") == (scheme == "light")
        page.close()


def test_dragging_zooms_a_double_click_returns_and_the_axis_can_be_traffic_or_time(browser: Any, report: Path) -> None:
    page, errors = opened(browser, report, 1280)
    reach = "document.querySelector('.canvas').layout.xaxis.range[1]"
    before = page.evaluate(reach)
    page.evaluate("document.querySelector('#retrieval').scrollIntoView()")
    box = page.locator(".canvas .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"], steps=5)
    page.mouse.up()
    page.wait_for_function(f"{reach} < {0.7 * before}")
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_function(f"Math.abs({reach} - {before}) < 0.01")
    for button, title in (
        ("over traffic", "traffic [MB]"),
        ("over time", "virtual time [s]"),
        ("over rounds", "round"),
    ):
        page.locator(".updatemenu-button", has_text=button).first.click()
        page.wait_for_function(f'document.querySelector(".canvas").layout.xaxis.title.text === "{title}"')
    assert errors == []
    page.close()


def test_no_text_of_a_figure_becomes_a_link_or_loads_anything(browser: Any, tmp_path: Path) -> None:
    text = '<a href="https://example.org">silo</a><img src="https://example.org/x.png">'
    figure = Figure("figure", text, "y")
    figure.draw("bar", x=[text], y=[1], name=text, showlegend=True)
    path = tmp_path / "page.html"
    path.write_text(document("page", [text], [figure]), encoding="utf-8")
    page, errors = opened(browser, path, 800)
    assert errors == []
    assert page.evaluate("document.querySelectorAll('a[*|href^=http], img').length") == 0
    assert text in page.evaluate("document.querySelector('.legendtext').textContent")
