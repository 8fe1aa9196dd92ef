"""Rank a data set's items by the similarities that DGCPN, DJSRH and JDSH teach to their codes, and print the mAP.

    python -m benchmarks.hashing_targets scenarios/feduch/wikipedia.yaml [--set data.path=wikipedia.npz ...]

These base losses use no labels; codes learn to reproduce a similarity of the frozen features. Each row ranks the
gallery for every query of the scenario's evaluated split by this similarity itself, without network or codes; items
with a common label are relevant. Unlike in cross-modal retrieval, the similarity sees both modalities of a query.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.metrics import average_precision_score
from torch import Tensor

from fedmq.config.resolve import load
from fedmq.federation.population import build_population
from protocols.objectives import dgcpn, djsrh, jdsh
from protocols.parts.losses import cosines
from protocols.parts.similarity import item_features

#: Similarities [n, n] from image and text features [n, d_i] and [n, d_t].
TARGETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine of the images": lambda image, text: cosines(image, image),
    "cosine of the texts": lambda image, text: cosines(text, text),
    "dgcpn": lambda image, text: dgcpn.Graph(image, text).similarity(torch.arange(len(image))),
    "djsrh": lambda image, text: djsrh.target(image, text, djsrh.Options()),
    "djsrh, beta 0.3": lambda image, text: djsrh.target(image, text, djsrh.Options(beta=0.3)),
    "jdsh": lambda image, text: jdsh.target(image, text, jdsh.Options()),
    "jdsh, alpha 0.1, beta 0.5": lambda image, text: jdsh.target(image, text, jdsh.Options(alpha=0.1, beta=0.5)),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hashing_targets",
        description="Rank items by the similarities that unsupervised hashing losses learn from.",
    )
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the scenario")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    population = build_population(load(arguments.scenario, arguments.set), pooled=True)
    parts = [population.load(rows, image=True, text=True) for rows in (population.evaluated, population.database)]
    image, text = (torch.cat(both) for both in zip(*map(item_features, parts), strict=True))
    labels = torch.cat([part.labels for part in parts if part.labels is not None]).float()
    queries = len(parts[0])
    relevant = (labels[:queries] @ labels[queries:].T > 0).numpy()
    table = Table("similarity", "mAP")
    for name, target in TARGETS.items():
        pairs = zip(relevant, target(image, text)[:queries, queries:].numpy(), strict=True)
        table.add_row(name, f"{np.mean([average_precision_score(*pair) for pair in pairs]):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
