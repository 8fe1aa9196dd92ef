"""Live pages and the board: the same figures as the report, for this machine and the holder of the token alone."""

from __future__ import annotations

import contextlib
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
    assert ">features</td>" in done
    assert re.search(r"<td class=\"text\">\d+ test images, \d+ captions</td>", done)
    assert re.search(r">\d{4}-\d\d-\d\d \d\d:\d\d</td>", done)
    assert "live" in httpx.get(f"{board}/run/begun %3Cb%3E", params={"token": TOKEN}).text
    assert httpx.get(f"{board}/run/elsewhere", params={"token": TOKEN}).status_code == 404
    assert httpx.get(f"{board}/compare?run=done", params={"token": TOKEN}).status_code == 400


@pytest.mark.parametrize("path", ["/", "/run/done", "/events/done", "/compare"])
@pytest.mark.parametrize("token", [None, "", "secret", "secret-token2"])
def test_every_page_needs_the_token(board: str, path: str, token: str | None) -> None:
    found = httpx.get(f"{board}{path}", params={} if token is None else {"token": token})
    assert found.status_code == 403
    assert "done" not in found.text


def test_pages_are_for_names_of_this_machine_only(board: str) -> None:
    found = httpx.get(f"{board}/", params={"token": TOKEN}, headers={"Host": "elsewhere.example"})
    assert found.status_code == 400


def test_nothing_can_be_changed(board: str) -> None:
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
    assert "Timeline of the silos" in titles
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


def test_connections_beyond_a_number_are_closed_those_that_wait_for_a_request_first(tmp_path: Path) -> None:
    def open_connection() -> socket.socket:
        return socket.create_connection((live_server.HOST, int(address.rpartition(":")[2].partition("/")[0])), 10)

    with live_server.serving(live_server.live_app(RunFolder(tmp_path), TOKEN, {}), 0, TOKEN) as address:
        stream = open_connection()
        stream.sendall(f"GET /events?token={TOKEN} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert stream.recv(12) == b"HTTP/1.1 200"
        idle = [open_connection() for _ in range(live_server.CONNECTIONS)]
        for _ in range(2):  # after the first answer, the server has all connections before it
            assert httpx.get(address).status_code == 200
        idle[0].settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b"", "the oldest of them"
        while b"data: " not in stream.recv(1 << 16):
            pass
        for each in (stream, *idle):
            each.close()


@pytest.mark.slow
def test_a_running_scenario_streams_its_figures(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedmq", "scenario", str(tiny), "--out", str(tmp_path / "run"), "--live"]
    program = subprocess.Popen(
        [*command, "--set", "rounds=300"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
