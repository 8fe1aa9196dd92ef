"""Figures of a running coordinator for Prometheus, on 127.0.0.1 only.

A page of another site in a browser on this machine could ask for them under a name that it resolves to 127.0.0.1, so
only requests to a numeric address or `localhost` are answered.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from typing_extensions import override

from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.runs.status import SiloPhase, StatusFile

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

#: Only processes of this machine can connect; a tunnel or an agent on this machine can pass the metrics on.
HOST = "127.0.0.1"


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # without a byte [s]

    @override
    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    @override
    def handle_error(self, *_: object) -> None:
        """Ignore a client that goes away or sends nothing."""


def _is_own(host: str) -> bool:
    """Whether a request's ``Host`` is a numeric address, or ``localhost``."""
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name.strip("[]")))
    return name.lower() == "localhost"


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
        phases = Counter(silo.phase for silo in status.silos.values())
        traffic = {"up": status.up, "down": status.down}
        for kind, name, text, label, values in (
            (GaugeMetricFamily, "fedmq_metric", "Metrics of the latest round evaluated.", "metric", status.metrics),
            (GaugeMetricFamily, "fedmq_silos", "Silos by phase.", "phase", {each: phases[each] for each in SiloPhase}),
            (CounterMetricFamily, "fedmq_payload_bytes", "Bytes of payload tensors.", "direction", traffic),
            (CounterMetricFamily, "fedmq_refused_messages", "Refused messages by reason.", "reason", status.refused),
        ):
            family = kind(name, text, labels=[label])
            for key, number in values.items():
                family.add_metric([str(key)], number)
            yield family


def serve(port: int, latest: Callable[[], StatusFile | None]) -> Callable[[], None]:
    """Serve the metrics at ``http://127.0.0.1:PORT/metrics``, in a separate thread; port 0 takes a free one.

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
