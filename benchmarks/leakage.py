"""What silos' payloads reveal to a curious coordinator, by method and mitigation.

    python -m benchmarks.leakage [--seeds 5] [--json FILE]

Each row is a scenario with the settings of one mitigation, run once per seed with `privacy.capture`, and attacked by
`fedmq audit --probe`. The JSON file has the form of `fedmq compare --json`, so `tools.make_results` writes its table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from benchmarks.runs import output_of, simulated
from fedmq.audit.payload_attacks import PayloadProbe
from fedmq.experiments.tables import Cell, Grid

_STATISTICS = "modality_prototypes: {clip_norm: 1.5, noise_multiplier: 1}, loss: {clip_norm: 5, noise_multiplier: 1}"
_GEOMETRY = ", geometry: {clip_norm: 4, noise_multiplier: 1}"
#: Settings of section privacy by name; ``<geometry>`` stands for that of methods that send it.
MITIGATIONS = {
    "none": "",
    "clipped updates": "clip_norm: 0.5",
    "noise on updates": "clip_norm: 0.5, noise_multiplier: 0.05",
    "noise on statistics": f"statistics: {{{_STATISTICS}<geometry>}}",
    "secure aggregation": "secure_aggregation: {max_weight: 1.0, min_contributors: 1.0}",
}
METHODS = {"fedavg": "protocol={name: fedavg}", "rcsr": "protocol={name: rcsr, warmup: 1}"}
#: Columns: payload and attack, and their heads.
ATTACKS = {
    "difference": ("update, difference", ("delta", "partial_delta")),
    "gradient": ("update, gradient", ("delta", "partial_delta")),
    "cosine, image": ("image prototype", ("modality_prototypes",)),
    "cosine, text": ("text prototype", ("modality_prototypes",)),
}


def probed(scenario: str, settings: list[str], seed: int) -> tuple[float, PayloadProbe]:
    """R@1 of a run (mean of both directions), and what the probe of its payloads found."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        summary = simulated(Path(scenario), run, *settings, f"seed={seed}")
        found = output_of("audit", str(run), "--probe")["payloads_probe"]
    return float(summary["metrics"]["mean_r1"]), TypeAdapter(PayloadProbe).validate_python(found)


def row(scenario: str, settings: list[str], seeds: int) -> list[str]:
    """The cells of one row: R@1, the attacks' AUC, and whose number of items is shown."""
    runs = [probed(scenario, settings, seed) for seed in range(seeds)]
    cells = [_over([recall for recall, _ in runs], ".4f")]
    for name, (_, kinds) in ATTACKS.items():
        values = [
            attack.result.auc.value
            for _, found in runs
            for attack in found.attacks
            if attack.name == name and attack.payload in kinds
        ]
        cells.append(_over(values, ".3f") if values else "not sent")
    sizes = [
        f"{one.payload} {one.found:.0%}" for one in runs[0][1].inferences if one.what == "the number of training items"
    ]
    return [*cells, ", ".join(sizes) or "nothing"]


def _over(values: list[float], form: str) -> str:
    spread = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{spread}".replace("0.", ".")


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leakage", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scenario", default="scenarios/smoke.yaml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table there")
    arguments = parser.parse_args()
    head = ("method", "mitigation", "mean_r1", *(name for name, _ in ATTACKS.values()), "number of items shown by")
    body = []
    for method, protocol in METHODS.items():
        for mitigation, keys in MITIGATIONS.items():
            own = keys.replace("<geometry>", _GEOMETRY if method == "rcsr" else "")
            settings = [protocol, f"privacy={{capture: true, {own}}}"]
            body.append((method, mitigation, *row(arguments.scenario, settings, arguments.seeds)))
            print(*body[-1], sep="  ", flush=True)
    table = Table(*head)
    for line in body:
        table.add_row(*line)
    Console().print(table)
    if arguments.json is not None:
        notes = (
            f"{arguments.seeds} seeds, mean and standard deviation over them. AUC of telling training pairs from "
            "held-out ones; .5 is guessing.",
        )
        grid = Grid(head, tuple(tuple(map(Cell, line)) for line in body), notes)
        command = f"python -m benchmarks.leakage --seeds {arguments.seeds}"
        kept = {"command": command, "table": asdict(grid), "runs": []}
        arguments.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
