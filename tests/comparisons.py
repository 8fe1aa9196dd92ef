"""Comparisons of tiny scenarios for tests: their rows, their files, and fabricated run folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmq.config.resolve import ResolvedRun, read
from fedmq.experiments import grid as planning
from fedmq.experiments import runner
from fedmq.experiments import summary as made_rows
from fedmq.experiments.grid import ComparisonPlan, Entry
from fedmq.launch.forkserver import start_job
from fedmq.runs import results
from fedmq.runs.results import Target
from fedmq.storage.run_folder import RunFolder


def resolve(file: Path, settings: list[str], seed: int | None) -> ResolvedRun:
    """A run without the method's options, which are not looked up."""
    source = read(file, settings, seed)
    return ResolvedRun(source, source.scenario, source.scenario.name, pooled=False, personal_only=False)


def entries(tiny: Path, vary: list[str], select: list[str] | None = None) -> tuple[Entry, ...]:
    varied = [planning.parse_variation(text, "--vary") for text in vary]
    chosen = [planning.parse_variation(text, "--select") for text in select or []]
    return planning.entries([tiny], [], varied, chosen, resolve)


def place(folder: Path, digest: Callable[[ResolvedRun], str] = lambda run: "data") -> runner.Workplace:
    return runner.Workplace(folder, resolve, digest, processes=True, jobs=2, start=start_job)


def digest_of(recall: float) -> str:
    """Digest of an untrained model."""
    return hashlib.sha256(str(recall).encode()).hexdigest()


def finish(folder: RunFolder, recall: float, *, scenario: str = "tiny", reached: float = 3.0) -> None:
    """Write the files of a finished run of two merges, evaluated before and after."""
    per_silo = {"silo-00": {"mean_r1": recall}, "silo-01": {"mean_r1": recall / 2}}
    silo = {"modalities": ["image", "text"], "samples": 9, "participations": 1, "tasks": 1, "heldout": 3}
    lines: list[dict[str, Any]] = [
        {"kind": "evaluation", "version": 0, "metrics": {"mean_r1": 0.1}, "per_silo": per_silo},
        {"kind": "merge", "version": 1, "now": 1.5, "replies": [], "staleness": []},
        {"kind": "merge", "version": 2, "now": reached, "replies": [], "staleness": []},
        {"kind": "evaluation", "version": 2, "metrics": {"mean_r1": recall}, "per_silo": per_silo},
    ]
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.summary.write_text(
        json.dumps(
            {
                "scenario": scenario,
                "model_digest": digest_of(recall),
                "metrics": {"mean_r1": recall},
                "fairness": {"std_r1": 0.2, "worst_r1": recall / 2, "gap_r1": 0.3},
                "bytes": {"up": {"delta": 100, "loss": 8}, "down": {"model": 50}},
                "seconds": {"virtual": reached},
                "processes": {"silos": 2},
                "protocol": "fedavg",
                "seed": 0,
                "rounds": 2,
                "versions": 2,
                "per_silo": {name: silo | own for name, own in per_silo.items()},
                "versions_of": {"fedmq": "0.1.0"},
            }
        )
    )


#: A comparison's plan and its result rows.
Study = tuple[ComparisonPlan, tuple[made_rows.Row, ...]]


def studied(tiny: Path, tmp_path: Path) -> Study:
    """Two methods at two values of the varied key, three seeds each; rcsr is .1 better and slower."""
    rows = entries(tiny, ["silos.count=4,50", "protocol=fedavg,rcsr"])
    plan = ComparisonPlan(rows, (0, 1, 2), ("mean_r1", "fairness.worst_r1"), (Target("mean_r1", 0.55),), zero_shot=True)
    finished: dict[str, dict[int, results.FinishedRun]] = {}
    for place_, row in enumerate(rows):
        for seed in plan.seeds:
            folder = RunFolder(tmp_path / f"{place_}-{seed}")
            finish(folder, 0.5 + 0.1 * (row.method == "rcsr") + 0.01 * seed, reached=3.0 + place_ + seed)
            finished.setdefault(row.name, {})[seed] = results.read(folder)
    del finished["rcsr, silos.count=50"][2]
    return plan, made_rows.rows(plan, {row.name: () for row in rows}, finished)


def comparison_file(folder: Path, text: str) -> Path:
    path = folder / "tables" / "table.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path
