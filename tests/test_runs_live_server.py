"""Live pages and the board: the same figures as the report, for this machine and the holder of the token alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import protocols
from fedmq.errors import InputError
from fedmq.runs import live_server
from fedmq.runs.live_server import GrowingRun
from fedmq.storage.regular_files import AppendedLines
from fedmq.storage.run_folder import RunFolder
from tests.threaded_run import resolved, run
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

TOKEN = "secret-token"


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run and one that has begun."""
    root = tmp_path_factory.mktemp("runs")
    run(resolved(tiny), root / "done")
    begun = RunFolder(root / "begun <b>")
    begun.root.mkdir()
    shutil.copy(root / "done" / "scenario.yaml", begun.scenario) if (root / "done" / "scenario.yaml").exists() else None
    (root / "no run").mkdir()
    (root / "link").symlink_to(root / "done")
    return root


@pytest.fixture
def board(finished: Path) -> Iterator[str]:
    """The address of the board."""
    with live_server.serving(live_server.board_app(finished, TOKEN, protocols.reported), 0, TOKEN) as address:
        yield address.partition("?")[0].rstrip("/")


@pytest.mark.slow
def test_the_board_lists_runs_and_opens_their_pages(board: str) -> None:
    page = httpx.get(f"{board}/", params={"token": TOKEN})
    assert page.status_code == 200
    assert "done" in page.text
    assert "begun &lt;b&gt;" in page.text
    assert "<b>" not in page.text.split("<tbody>")[1].split("</tbody>")[0]
    assert "no run" not in page.text
    begun = page.text.split("begun &lt;b&gt;</a>")[1].split("</tr>")[0]
    assert ">rcsr</td>" in begun and "not started" in begun
    assert 'value="link"' not in page.text
    report = httpx.get(f"{board}/run/done", params={"token": TOKEN})
    assert "Retrieval on the held-out split" in report.text
    policy = report.headers["Content-Security-Policy"]  # its scripts cannot read other pages, and send nothing
    assert policy.startswith("sandbox ") and "default-src 'none'" in policy and "allow-same-origin" not in policy
    done = page.text.split("/run/done?")[1].split("</tr>")[0]
    assert ">features: 30 test images, 60 captions</td>" in done
    assert re.search(r">\d{4}-\d\d-\d\d \d\d:\d\d</td>", done)
    assert "live" in httpx.get(f"{board}/run/begun %3Cb%3E", params={"token": TOKEN}).text
    assert httpx.get(f"{board}/run/elsewhere", params={"token": TOKEN}).status_code == 404
    assert httpx.get(f"{board}/compare?run=done", params={"token": TOKEN}).status_code == 400


def test_pages_are_read_only_for_names_of_this_machine_and_the_holder_of_the_token(board: str) -> None:
    for path in ("/", "/run/done", "/events/done", "/compare"):
        for params in ({}, {"token": ""}, {"token": "secret"}, {"token": "secret-token2"}):
            answer = httpx.get(f"{board}{path}", params=params)
            assert answer.status_code == 403 and "done" not in answer.text, (path, params)
    found = httpx.get(f"{board}/", params={"token": TOKEN}, headers={"Host": "elsewhere.example"})
    assert found.status_code == 400
    for method in ("POST", "PUT", "DELETE"):
        assert httpx.request(method, f"{board}/run/done", params={"token": TOKEN}).status_code == 405


def test_a_port_in_use_is_one_clear_error(finished: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(InputError, match="a free port"),
            live_server.serving(live_server.board_app(finished, TOKEN, protocols.reported), port, TOKEN),
        ):
            pass


def test_a_growing_run_reads_only_what_is_new_and_gives_the_figures_of_the_whole(
    finished: Path, tmp_path: Path
) -> None:
    source, folder = RunFolder(finished / "done"), RunFolder(tmp_path / "run")
    (folder.root / "messages").mkdir(parents=True)
    folder.scenario.write_bytes(source.scenario.read_bytes())
    growing = GrowingRun(folder, {})
    assert not growing.update()
    assert growing.figures() == []
    for original, copy in (
        (source.metrics, folder.metrics),
        (source.messages("coordinator"), folder.messages("coordinator")),
    ):
        content = original.read_bytes()
        for start in range(0, len(content), 3000):
            with copy.open("ab") as file:
                file.write(content[start : start + 3000])
            growing.update()
    assert not growing.update()
    whole = GrowingRun(source, {})
    whole.update()
    assert [figure.plain() for figure in growing.figures()] == [figure.plain() for figure in whole.figures()]
    titles = [figure.title for figure in whole.figures()]
    timeline = whole.figures()[titles.index("Timeline of the silos")]
    assert timeline.x["title"] == {"text": "virtual time [s]"}, "the live page names the clock as the report does"
    folder.metrics.write_bytes(folder.metrics.read_bytes().splitlines(keepends=True)[0])
    assert growing.update()
    assert len(growing.lines) == 1, "a resumed run cuts its metrics"


def test_a_pipe_or_a_device_is_not_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "nothing"):
        assert AppendedLines(tmp_path / name).new() == ([], False)


def test_a_report_that_is_no_text_or_no_file_does_not_fail_the_board(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(finished / "done" / "scenario.yaml", tmp_path / "run")
    (tmp_path / "run" / "report.html").write_bytes(b"\xff<p>")
    with live_server.serving(live_server.board_app(tmp_path, TOKEN, protocols.reported), 0, TOKEN) as address:
        found = httpx.get(f"{address.partition('?')[0]}run/run", params={"token": TOKEN})
        assert (found.status_code, found.content) == (200, b"\xff<p>")


def test_the_board_finds_runs_in_sub_folders(finished: Path, tmp_path: Path) -> None:
    for name in ("a/b/run & 1", "a/run", ".hidden/run"):
        shutil.copytree(finished / "done", tmp_path / name)
    shutil.copytree(finished / "done", tmp_path / "a" / "run" / "inside")
    assert sorted(row.name for row in live_server.rows_of(tmp_path)) == ["a/b/run & 1", "a/run"]
    with live_server.serving(live_server.board_app(tmp_path, TOKEN, protocols.reported), 0, TOKEN) as address:
        board, given = address.partition("?")[0], {"token": TOKEN}
        links = re.findall(r'href="/(run/[^"]+)"', httpx.get(board, params=given).text)
        assert len(links) == 2 and all(httpx.get(board + link).status_code == 200 for link in links)
        both = [("token", TOKEN), ("run", "a/run"), ("run", "a/b/run & 1")]
        assert httpx.get(f"{board}compare", params=both).status_code == 200
        assert httpx.get(f"{board}run/a", params=given).status_code == 404


def test_connections_beyond_a_number_are_refused(tmp_path: Path) -> None:
    with live_server.serving(live_server.live_app(RunFolder(tmp_path), TOKEN, {}), 0, TOKEN) as address:
        assert httpx.get(address).status_code == 200
        port = int(address.rpartition(":")[2].partition("/")[0])
        idle = [socket.create_connection((live_server.HOST, port), 10) for _ in range(live_server.CONNECTIONS)]
        assert httpx.get(address).status_code == 503
        for each in idle:
            each.close()


@pytest.mark.slow
def test_a_running_scenario_streams_its_figures(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedmq", "scenario", str(tiny), "--out", str(tmp_path / "run"), "--live"]
    program = subprocess.Popen(
        [*command, "--set", "rounds=300", "--set", "launcher=inline"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stderr is not None
        address = ""
        for line in program.stderr:
            if line.startswith("live: "):
                address = line.removeprefix("live: ").strip()
                break
        threading.Thread(target=program.stderr.read, daemon=True).start()
        base, _, token = address.partition("?")
        assert "<html" in httpx.get(address).text
        updates = _updates(f"{base}events?{token}")
        last = updates[-1]
        assert any("figures" in update for update in updates)
        assert last["status"]["rounds"] == 300
    finally:
        program.terminate()
        program.wait(PATIENCE)


def _updates(address: str) -> list[dict[str, Any]]:
    """The first few updates of a stream, until one has figures of a merge."""
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + PATIENCE
    with httpx.stream("GET", address, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if any(each["title"] == "Training loss" for each in found[-1].get("figures", ())):
                    return found
            assert time.monotonic() < deadline
    return found
