"""Figures of a running coordinator for Prometheus, on 127.0.0.1 only.

A page of another site in a browser on this machine could ask for them under a name that it resolves to 127.0.0.1, so
only requests to a numeric address, `localhost` or this machine's name are answered. Connections are limited: each takes
a file descriptor and a thread of the coordinator.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.runs.status import SiloPhase, StatusFile

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

#: Only processes of this machine can connect; a tunnel or an agent on this machine can pass the metrics on.
HOST = "127.0.0.1"
#: Connections that may be open; the oldest are closed.
CONNECTIONS = 32
#: Time without a byte after which a request is given up [s].
_REQUEST_SECONDS = 10.0


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lock, self._open = threading.Lock(), dict[Any, None]()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, and close the oldest one if there are too many."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > CONNECTIONS else None
            self._open.pop(oldest, None)
            if oldest is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors other than a client's that goes away or sends nothing."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _is_own(host: str) -> bool:
    """Whether a request's ``Host`` is a numeric address, or this machine's name."""
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name.strip("[]")))
    return name.lower() in ("localhost", socket.gethostname().lower())


class _Collector:
    """Computes the metrics from the latest status whenever they are queried."""

    def __init__(self, latest: Callable[[], StatusFile | None]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[Any]:
        """The metrics of the latest status, in Prometheus' types."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        status = self._latest()
        if status is None:
            return
        gauges: dict[str, tuple[str, float | None]] = {
            "fedmq_round": ("Merges so far.", status.round),
            "fedmq_rounds": ("Total number of merges.", status.rounds),
            "fedmq_elapsed_seconds": ("Real time since the coordinator started.", status.elapsed),
            "fedmq_metrics_round": ("Round of the metrics.", status.metrics_round),
            "fedmq_loss": ("Mean training loss of the last merge.", status.loss),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        metrics = GaugeMetricFamily("fedmq_metric", "Metrics of the latest round evaluated.", labels=["metric"])
        for name, value in status.metrics.items():
            metrics.add_metric([name], value)
        yield metrics
        phases = GaugeMetricFamily("fedmq_silos", "Silos by phase.", labels=["phase"])
        for phase in SiloPhase:
            phases.add_metric([phase.value], sum(silo.phase is phase for silo in status.silos.values()))
        yield phases
        traffic = CounterMetricFamily("fedmq_payload_bytes", "Bytes of payload tensors.", labels=["direction"])
        traffic.add_metric(["up"], status.up)
        traffic.add_metric(["down"], status.down)
        yield traffic
        refused = CounterMetricFamily("fedmq_refused_messages", "Refused messages by reason.", labels=["reason"])
        for reason, count in status.refused.items():
            refused.add_metric([reason], count)
        yield refused


def serve(port: int, latest: Callable[[], StatusFile | None]) -> Callable[[], None]:
    """Serve the metrics at ``http://127.0.0.1:PORT/metrics``, in a separate thread.

    Args:
        port: a port of this machine; 0 for a free one.
        latest: returns the latest status.

    Returns:
        A function that ends the service.

    Raises:
        InputError: prometheus_client is not installed, or the port is in use.
    """
    client = package("prometheus_client", "prometheus", "--metrics-port")
    registry = client.CollectorRegistry()
    registry.register(_Collector(latest))
    metrics = client.make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if _is_own(environ.get("HTTP_HOST", HOST)):
            return cast("Iterable[bytes]", metrics(environ, start))
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"the host name of the address is not this machine's: use 127.0.0.1 or another numeric address\n"]

    try:
        server = make_server(HOST, port, answer, _Server, _Handler)
    except OSError as error:
        found = f"{port} ({error.strerror})"
        raise InputError("--metrics-port", found, "a free port on which you may listen") from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
