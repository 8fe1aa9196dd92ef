"""The work of :mod:`benchmarks.rounds` in Flower's simulation: ``python flower.py SILOS ROUNDS PARAMETERS``.

It needs only flwr and NumPy, and runs in an environment of its own, see :mod:`benchmarks.peers.comparison`. Silos
answer a constant update without training; the strategy is FedAvg, without evaluation. Prints the seconds of each round
but the first as a JSON list.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


class Timed(FedAvg):  # type: ignore[misc]
    """FedAvg that notes when each round was merged."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.merged_at: list[float] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """FedAvg's merge."""
        merged = super().aggregate_train(server_round, replies)
        self.merged_at.append(time.perf_counter())
        return merged


def main() -> None:
    """Run the simulation."""
    silos, rounds, parameters = map(int, sys.argv[1:])
    client, server = ClientApp(), ServerApp()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        (model,) = message.content["arrays"].to_numpy_ndarrays()
        content = {"arrays": ArrayRecord([model + np.float32(1e-3)]), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def run(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=silos, min_train_nodes=silos)
        initial = ArrayRecord([np.zeros(parameters, np.float32)])
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds, train_config=ConfigRecord())
        print(json.dumps(np.diff(strategy.merged_at).tolist()))

    # Two actors at a time, as on two cores.
    run_simulation(server, client, silos, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


if __name__ == "__main__":
    main()
