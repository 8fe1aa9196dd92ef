"""Figures of a running coordinator for Prometheus, on 127.0.0.1 only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fedmq.errors import InputError
from fedmq.extras import package
from fedmq.runs.status import SiloPhase, StatusFile

#: Only processes of this machine can connect; a tunnel or an agent on this machine can pass the metrics on.
HOST = "127.0.0.1"


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
    try:
        server, thread = client.start_http_server(port, HOST, registry)
    except OSError as error:
        found = f"{port} ({error.strerror})"
        raise InputError("--metrics-port", found, "a free port on which you may listen") from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
