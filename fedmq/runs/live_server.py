"""Pages served on 127.0.0.1: a run in progress, and the board of all runs in a folder.

The pages are read-only. Each needs the token of its address, and the host name must be this machine's, so that a page
of another site in the same browser cannot read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedmq.config.resolve import load
from fedmq.errors import InputError
from fedmq.evaluation.metrics import metric_of
from fedmq.packages import package
from fedmq.runs.report import figures, run_report
from fedmq.runs.report.html import Figure, render
from fedmq.runs.report.logs import LogFacts, add_records, time_axis, timeline
from fedmq.runs.results import (
    Gallery,
    gallery_of,
    gallery_of_status,
    meaningful,
    new_metrics,
    read_summary,
    with_own_figures,
)
from fedmq.runs.run_records import EvaluationLine, MergeLine, MetricsLine, PersonalLine
from fedmq.runs.status import read_status
from fedmq.storage.regular_files import AppendedLines, read_regular
from fedmq.storage.run_folder import RunFolder
from fedmq.text import size_text
from fedmq.wire.messages import COORDINATOR

if TYPE_CHECKING:
    from fedmq.federation.protocol import ReportedValue

HOST = "127.0.0.1"
#: Interval between two updates of a page [s].
_UPDATE_SECONDS = 2.0
#: Maximum share of the time spent drawing charts, so that a page does not slow its run down.
_DRAWING_SHARE = 0.02
#: Depth of the runs' folders in the board's folder.
_DEPTH = 5
#: Metrics in the head of a live page and on the board.
_SHOWN: tuple[str, ...] = ("mean_r1", "mean_r10", "map")
#: What a run in a phase is doing, for readers who do not know the rounds' states; other phases are shown as they are.
_STATES: Mapping[str, str] = {"gathering": "waiting for silos", "collecting": "running", "merging": "running"}
#: Maximum size of a report [bytes].
_MOST_REPORT = 1 << 28
#: Connections that may be open, each a file descriptor of a process that supervises a run; more are answered with 503.
CONNECTIONS = 64
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}

#: A report is a file that came with its folder. A script in it can neither read other pages nor send anything.
_REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads allow-modals; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:"
)
_REPORT_HEADERS = {**_HEADERS, "Content-Security-Policy": _REPORT_POLICY}

CaptionsOf = Callable[[str], "Mapping[str, ReportedValue]"]


@dataclass
class GrowingRun:
    """The records of a run as they are written; each call of :meth:`update` reads only what is new."""

    folder: RunFolder
    captions: Mapping[str, ReportedValue]
    lines: list[MetricsLine] = field(default_factory=list)
    facts: LogFacts = field(default_factory=LogFacts)

    def __post_init__(self) -> None:
        self._metrics = AppendedLines(self.folder.metrics)
        self._log = AppendedLines(self.folder.messages(COORDINATOR))

    def update(self) -> bool:
        """Read new records; returns whether there were any."""
        metrics, cut = new_metrics(self._metrics)
        self.lines = [*([] if cut else self.lines), *metrics]
        records, _ = self._log.new()
        add_records(self.facts, records)
        return bool(metrics or records)

    def figures(self) -> list[Figure]:
        """The charts of the records so far, as the report draws them."""
        gallery = self._gallery()
        evaluations = [
            line.model_copy(update={"metrics": meaningful(line.metrics, gallery)})
            for line in self.lines
            if isinstance(line, EvaluationLine)
        ]
        merges = [line for line in self.lines if isinstance(line, MergeLine)]
        personal = [line for line in self.lines if isinstance(line, PersonalLine)]
        if not self.folder.scenario.is_file():
            return []
        clock = time_axis(load(self.folder.scenario))
        names = sorted({silo for silo, _ in self.facts.tasks} | {name for line in merges for name in line.replies})
        charts = [
            *figures.curves(evaluations, merges, personal, (), self.facts.bytes_at, clock),
            *figures.losses(merges),
            *figures.served(evaluations, personal),
            timeline(self.facts, merges, names, clock),
            # The modalities of the silos are known only at the end of the run.
            *figures.reported(merges, dict.fromkeys(names, ()), self.captions),
            figures.staleness(merges),
        ]
        return [figure for figure in charts if figure is not None]

    def _gallery(self) -> Gallery | None:
        with contextlib.suppress(InputError):
            return gallery_of_status(read_status(self.folder.status))
        return None

    def status(self) -> dict[str, object]:
        """What the run is doing, for the head of the page."""
        try:
            status = read_status(self.folder.status)
        except InputError:
            return {"phase": "starting"}
        silos: dict[str, int] = {}
        for silo in status.silos.values():
            silos[silo.phase.value] = silos.get(silo.phase.value, 0) + 1
        return {
            "phase": "finished" if self.folder.summary.is_file() else _STATES.get(status.phase, status.phase),
            "round": status.round,
            "rounds": status.rounds,
            "loss": status.loss,
            "metrics": _brief(status.metrics),
            "metrics_round": status.metrics_round,
            "exchanged": size_text(status.up + status.down),
            "seconds": status.elapsed,
            "silos": silos,
        }


def _brief(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in _SHOWN if name in metrics}


def _update(run: GrowingRun) -> str:
    """One update of a live page as JSON."""
    figures = [
        {"title": figure.title, "note": figure.note, "height": figure.height, **figure.plain()}
        for figure in run.figures()
    ]
    return json.dumps({"status": run.status(), "figures": figures})


def live_app(folder: RunFolder, token: str, captions: Mapping[str, ReportedValue]) -> Any:
    """The pages of one run: ``/`` and the stream ``/events``."""
    responses = package("starlette.responses", "live", "--live")

    async def page(_: Any) -> Any:
        return responses.HTMLResponse(_live_page(folder, "/events", token), headers=_HEADERS)

    async def events(request: Any) -> Any:
        return _stream(request, folder, captions)

    return _app({"/": page, "/events": events}, token)


def _live_page(folder: RunFolder, events: str, token: str) -> str:
    titles = {name: metric_of(name).heading for name in _SHOWN}
    return render("live.html.jinja", title=f"Run {folder.root.name}, live", events=events, token=token, titles=titles)


def _stream(request: Any, folder: RunFolder, captions: Mapping[str, ReportedValue]) -> Any:
    """Server-sent events: the status every two seconds; the charts after new records, less often if drawing is slow."""

    async def updates() -> AsyncIterator[str]:
        run = GrowingRun(folder, captions)
        undrawn, next_drawing = False, 0.0
        while not await request.is_disconnected():
            finished = folder.summary.is_file()  # before reading, so that the last drawing has all records
            undrawn |= await asyncio.to_thread(run.update)
            status, before = run.status(), time.monotonic()
            if undrawn and (finished or before >= next_drawing):
                yield f"data: {await asyncio.to_thread(_update, run)}\n\n"
                undrawn, now = False, time.monotonic()
                next_drawing = now + (now - before) / _DRAWING_SHARE
            else:
                yield f"data: {json.dumps({'status': status})}\n\n"
            if finished:
                return
            await _until_next_update(folder)

    response = package("starlette.responses", "live", "--live").StreamingResponse
    return response(updates(), media_type="text/event-stream", headers=_HEADERS)


async def _until_next_update(folder: RunFolder) -> None:
    """Wait for the next update; not after the end of the run, as the command waits until its end has been shown."""
    until = time.monotonic() + _UPDATE_SECONDS
    while time.monotonic() < until and not folder.summary.is_file():
        await asyncio.sleep(0.1)


@dataclass(frozen=True)
class RunRow:
    """A run on the board."""

    name: str  # path of its folder in the board's
    method: str  # training method
    seed: int  # seed of the run
    state: str  # ``finished``, or what a run that is in progress or was stopped is doing
    round: int  # number of merges
    metrics: dict[str, float]  # value by name of a few metrics
    written: float  # time of its last write, in seconds since the epoch
    data: str  # name of the data set; ``own`` if each silo has its own
    gallery: str  # the items that the metrics were measured on, in words; empty if unknown

    @property
    def date(self) -> str:
        """Date and time of the last write (UTC), which sorts as text."""
        return datetime.fromtimestamp(self.written, UTC).strftime("%Y-%m-%d %H:%M")


def rows_of(root: Path) -> list[RunRow]:
    """All runs in a folder and its sub-folders, the last one first; folders that are not runs are left out."""
    rows = []
    for path, below, files in os.walk(root):
        folder = RunFolder(Path(path))
        is_run = folder.root != root and folder.scenario.name in files
        depth = len(folder.root.relative_to(root).parts)
        below[:] = [] if is_run or depth >= _DEPTH else [name for name in below if not name.startswith(".")]
        if is_run:
            with contextlib.suppress(InputError, OSError):
                rows.append(_row(folder, folder.root.relative_to(root).as_posix()))
    return sorted(rows, key=lambda row: -row.written)


def _row(folder: RunFolder, name: str) -> RunRow:
    scenario = load(folder.scenario)
    method, seed, state, version = scenario.protocol.label, scenario.seed, "not started", 0
    metrics: Mapping[str, float] = {}
    gallery, last = None, folder.scenario
    if folder.summary.is_file():
        summary, last = with_own_figures(read_summary(folder)), folder.summary
        method, seed, state, version = summary.protocol, summary.seed, "finished", summary.versions
        metrics, gallery = summary.metrics, gallery_of(summary)
    elif folder.status.is_file():
        status, last = read_status(folder.status), folder.status
        state, version = _STATES.get(status.phase, status.phase), status.round
        metrics, gallery = status.metrics, gallery_of_status(status)
    data, items = "own" if scenario.data is None else scenario.data.name, "" if gallery is None else gallery.items
    shown = _brief(meaningful(metrics, gallery))
    return RunRow(name, method, seed, state, version, shown, last.stat().st_mtime, data, items)


def board_app(root: Path, token: str, captions_of: CaptionsOf) -> Any:
    """The pages of all runs in a folder: the table, each run's report or live page, and several side by side."""
    responses = package("starlette.responses", "live", "fedmq board")

    def folder_of(name: str) -> RunFolder | None:
        return RunFolder(root / name) if name in {row.name for row in rows_of(root)} else None

    async def board(_: Any) -> Any:
        rows = await asyncio.to_thread(rows_of, root)
        page = render("board.html.jinja", title=f"{root.resolve().name}: {len(rows)} runs", rows=rows, token=token)
        return responses.HTMLResponse(page, headers=_HEADERS)

    async def run_page(request: Any) -> Any:
        folder = folder_of(request.path_params["name"])
        if folder is None:
            return responses.PlainTextResponse("no such run", 404)
        if folder.report.is_file():
            try:
                report = read_regular(folder.report, "a report that `fedmq report` wrote", _MOST_REPORT)
            except InputError as error:
                return responses.PlainTextResponse(str(error), 404)
            return responses.HTMLResponse(report, headers=_REPORT_HEADERS)
        events = f"/events/{quote(request.path_params['name'])}"
        return responses.HTMLResponse(_live_page(folder, events, token), headers=_HEADERS)

    async def events_of(request: Any) -> Any:
        folder = folder_of(request.path_params["name"])
        if folder is None:
            return responses.PlainTextResponse("no such run", 404)
        name = load(folder.scenario).protocol.name
        return _stream(request, folder, await asyncio.to_thread(captions_of, name))

    async def compared(request: Any) -> Any:
        chosen = [folder_of(name) for name in request.query_params.getlist("run")]
        folders = [folder for folder in chosen if folder is not None and folder.summary.is_file()]
        if len(folders) < 2:
            return responses.PlainTextResponse("choose two finished runs or more", 400)
        return responses.HTMLResponse(await asyncio.to_thread(run_report.side_by_side, folders), headers=_HEADERS)

    return _app(
        {"/": board, "/run/{name:path}": run_page, "/events/{name:path}": events_of, "/compare": compared}, token
    )


def _app(pages: Mapping[str, Callable[[Any], Any]], token: str) -> Any:
    """An application whose pages need the token, and a host name of this machine."""
    routing = package("starlette.routing", "live", "--live")
    responses = package("starlette.responses", "live", "--live")
    trusted = package("starlette.middleware.trustedhost", "live", "--live").TrustedHostMiddleware
    hosts = package("starlette.middleware", "live", "--live").Middleware(trusted, allowed_hosts=[HOST, "localhost"])

    def with_token(page: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def view(request: Any) -> Any:
            if secrets.compare_digest(request.query_params.get("token", "").encode(), token.encode()):
                return await page(request)
            text = "the address lacks its token: open the address that the program printed"
            return responses.PlainTextResponse(text, 403)

        return view

    routes = [routing.Route(path, with_token(page)) for path, page in pages.items()]
    return package("starlette.applications", "live", "--live").Starlette(routes=routes, middleware=[hosts])


@contextlib.contextmanager
def serving(app: Any, port: int, token: str) -> Iterator[str]:
    """Serve a Starlette application on 127.0.0.1 in a thread while the block runs; port 0 takes a free one.

    Yields:
        The address to open.

    Raises:
        InputError: the port is in use, or a package is missing.
    """
    uvicorn = package("uvicorn", "live", "--live")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # before the address is printed, so that no browser is refused while uvicorn starts
    except OSError as error:
        listener.close()
        raise InputError("--live-port", port, f"a free port, or 0 for any ({error.strerror})") from None
    config = uvicorn.Config(
        app, limit_concurrency=CONNECTIONS, log_level="error", access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"
    finally:
        server.should_exit = True
        thread.join(5.0)
        listener.close()


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(24)
