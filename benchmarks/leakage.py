"""What silos' payloads reveal to a curious coordinator, by method and mitigation.

    python -m benchmarks.leakage [--seeds 5] [--jobs 2] [--out docs/results/data]

Each row is a scenario with the settings of one mitigation, run once per seed with `privacy.capture`, and attacked as by
`fedmq audit --probe --shadows 8`. Finished runs are kept in `leakage.json`: the same command continues. The other
files have the form of `fedmq compare --json`, so `tools.make_results` writes their tables.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from scipy.stats import t

import protocols
from benchmarks.runs import simulated
from fedmq.audit.payload_attacks import PayloadProbe, probe_payloads
from fedmq.config.resolve import read, resolve
from fedmq.experiments.tables import Cell, Grid
from fedmq.launch.supervisor import simulate_inline
from fedmq.retrieval.released_model import open_release
from fedmq.runs.results import read_summary
from fedmq.storage.run_folder import RunFolder

SHADOWS = 8
KEPT = "leakage.json"


@dataclass(frozen=True)
class Method:
    """A method, as rows of the tables have it."""

    settings: tuple[str, ...]
    metric: str  # by which its runs are measured, of the personal models if silos have them
    statistics: str = ""  # clipping and noise of what silos send besides updates
    clip: float = 0.5  # norm to which updates are clipped


_PROTOTYPES = "modality_prototypes: {clip_norm: 1.5, noise_multiplier: 1}, loss: {clip_norm: 5, noise_multiplier: 1}"
#: Classes of few items at some silos, and the training of the methods' own scenarios.
_HASHED = (
    "partition={kind: dir_class, alpha: 0.1}",
    "training={optimizer: adam, learning_rate: 1.0e-3, weight_decay: 0.0, warmup_rounds: 0, local_epochs: 5}",
)
#: The methods, in runs with the silos and data of the smoke scenario.
METHODS: Mapping[str, Method] = {
    "fedavg": Method(("protocol={name: fedavg}",), "mean_r1", _PROTOTYPES),
    "rcsr": Method(
        ("protocol={name: rcsr, warmup: 1}",),
        "mean_r1",
        f"{_PROTOTYPES}, geometry: {{clip_norm: 4, noise_multiplier: 1}}",
    ),
    "fedcafe": Method(
        (
            "protocol={name: fedcafe, memory: class_mean, weighted_agg: false}",
            "objective={base: dcmh, bits: 32, hidden: 256, eta: 1.0, image_layers: 0}",
            *_HASHED,
        ),
        "map",
        "memory: {clip_norm: 3, noise_multiplier: 0.2}",
    ),
    "fedhap": Method(
        (
            "protocol={name: fedhap}",
            "objective={base: triplet, bits: 48, hidden: 256, mu: 0.005, reduce: mean}",
            *_HASHED,
        ),
        "map",
        "class_prototypes: {clip_norm: 10, noise_multiplier: 0.2}",
    ),
    "fedscmr": Method(
        (
            "protocol={name: fedscmr, eval_space: enhanced}",
            "objective={base: dscmr, enhance: true, hidden: 256, bits: 256}",
            *_HASHED,
            "training.validation=0.2",
        ),
        "map",
    ),
    "rcsr-p": Method(("protocol={name: rcsr, warmup: 1, personal: router, personal_onset: 1}",), "mean_r1"),
    "pfedmma": Method(("protocol={name: pfedmma}", "backbone={name: lite, adapter: mma, bottleneck: 32}"), "mean_r1"),
    "feduch": Method(("protocol={name: feduch}", "objective={base: dgcpn, bits: 64, hidden: 256}", *_HASHED), "map"),
    "fedavg with sgd": Method(
        (
            "protocol={name: fedavg}",
            "training={optimizer: sgd, momentum: 0.0, weight_decay: 0.0, learning_rate: 0.1, warmup_rounds: 1}",
        ),
        "mean_r1",
    ),
}
#: Methods that are measured without mitigations only.
_PLAIN = ("fedscmr", "rcsr-p", "pfedmma")
#: Settings of section privacy by name; ``<clip>`` and ``<statistics>`` are the method's.
MITIGATIONS = {
    "none": "",
    "least support 8": "least_support: 8",
    "noise on updates": "clip_norm: <clip>, noise_multiplier: 0.05",
    "clipped updates": "clip_norm: <clip>",
    "noise on statistics": "statistics: {<statistics>}",
    "noise in local steps": "items: {group: 8, clip_norm: <clip>, noise_multiplier: 0.5}",
    "secure aggregation": "secure_aggregation: {max_weight: 1.0, min_contributors: 1.0}",
}
_UPDATES = ("delta", "partial_delta")
_CLASSES = ("class_prototypes", "memory")
_UNKNOWN = "no value"  # not sent, or not measured: runs that were kept before this was measured
Format = Callable[[Sequence[Mapping[str, float]]], str]


def _over(name: str, form: str = ".3f") -> Format:
    """The mean of a value over runs, and half of its 95 % t-interval."""

    def cell(runs: Sequence[Mapping[str, float]]) -> str:
        values = [run[name] for run in runs if name in run]
        if not values:
            return "not sent"
        half = stdev(values) / math.sqrt(len(values)) * t.ppf(0.975, len(values) - 1) if len(values) > 1 else math.nan
        return f"{mean(values):{form}}{'' if math.isnan(half) else f' ± {half:{form}}'}".replace("0.", ".")

    return cell


def _against(name: str, form: str) -> Format:
    """How often an inference is right over all runs, how often by guessing, and of how many."""

    def cell(runs: Sequence[Mapping[str, float]]) -> str:
        made = [(run[name], run[f"{name}, chance"], run[f"{name}, count"]) for run in runs if name in run]
        count = sum(each[2] for each in made)
        right, chance = (sum(each[i] * each[2] for each in made) / count if count else 0.0 for i in (0, 1))
        return f"{right:{form}} ({chance:{form}}), {count:.0f}" if count else "not sent"

    return cell


def _known(name: str) -> Format:
    """How often a fact about a silo is read correctly over all runs, and how often by guessing."""
    against = _against(name, ".0%")

    def cell(runs: Sequence[Mapping[str, float]]) -> str:
        return against(runs).partition(",")[0].replace("not sent", _UNKNOWN)

    return cell


#: Tables: their files, and the heads and contents of their columns; a row has a value in a column besides the first.
TABLES: Mapping[str, Mapping[str, Format]] = {
    "leakage_updates": {
        "quality": _over("quality"),
        "gradient: AUC": _over("update, gradient"),
        "shadows: AUC": _over("update, shadows"),
        "TPR": _over("update, shadows, TPR"),
        "one modality: AUC": _over("update, shadows, one modality"),
    },
    "leakage_prototypes": {
        "quality": _over("quality"),
        "AUC, image": _over("modality_prototypes, cosine, image"),
        "AUC, text": _over("modality_prototypes, cosine, text"),
        "nearest item": _against("modality_prototypes, a prototype", ".0%"),
        "modalities, by prototypes": _known("modality_prototypes, which modalities a silo has"),
        "by updates": _known("an update or its report, which modalities a silo has"),
    },
    "leakage_rows": {
        "quality": _over("quality"),
        **{size: _against(f"rows, a row of {size}", ".0%") for size in ("1 item", "2 to 7 items", "8 items or more")},
    },
    "leakage_inversion": {
        "quality": _over("quality"),
        **{
            f"{modality}, {batch}": _against(f"{modality}, {batch}", ".2f")
            for modality in ("image", "text")
            for batch in (1, 8)
        },
    },
}


def values_of(measured: PayloadProbe) -> dict[str, float]:
    """What a probe found, as values by name."""
    found = dict[str, float]()
    for attack in measured.attacks:
        name = f"{'update' if attack.payload in _UPDATES else attack.payload}, {attack.name}"
        name += "" if attack.paired else ", one modality"
        found |= {name: attack.result.auc.value, f"{name}, TPR": attack.result.tpr.value}
    for one in measured.inferences:
        name = f"{'rows' if one.payload in _CLASSES else one.payload}, {one.what.rpartition(' nearest to ')[2]}"
        found |= {name: one.found, f"{name}, chance": one.chance or 0.0, f"{name}, count": one.count}
    for each in measured.inversions:
        name = f"{each.modality}, {each.batch}"
        found |= {name: each.cosine, f"{name}, chance": each.chance, f"{name}, count": each.count}
    return found


def allowed(method: str, mitigation: str) -> bool:
    """Whether a mitigation is measured with a method: it changes what silos send, or how they train."""
    if mitigation == "noise in local steps":
        return method.startswith("fedavg")
    if method in _PLAIN or method.endswith("sgd"):
        return mitigation == "none"
    by_class = "memory" in METHODS[method].statistics or "class_prototypes" in METHODS[method].statistics
    return {"noise on statistics": METHODS[method].statistics != "", "least support 8": by_class}.get(mitigation, True)


def probed(scenario: str, method: str, mitigation: str, seed: int) -> dict[str, float]:
    """The quality of a run (mean of both directions), and what the probe of its payloads found."""
    torch.set_num_threads(1)
    about, secure = METHODS[method], mitigation == "secure aggregation"
    keys = MITIGATIONS[mitigation].replace("<clip>", str(about.clip)).replace("<statistics>", about.statistics)
    settings = (*about.settings, f"privacy={{capture: true, {keys}}}", f"seed={seed}", "evaluation.every=0")
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        if secure:  # which needs processes with keys
            simulated(Path(scenario), folder.root, *settings)
        else:
            run = resolve(read(Path(scenario), [*settings, "launcher=inline"]), protocols)
            folder.root.mkdir()
            folder.scenario.write_text(run.scenario.dump(), encoding="utf-8")
            simulate_inline(run, folder, resume=False, status=lambda _: None)
        measured = probe_payloads(open_release(folder.root), shadows=SHADOWS)
        summary = read_summary(folder)
        return {"quality": (summary.personal or summary.metrics)[about.metric], **values_of(measured)}


def table(columns: Mapping[str, Format], runs: Mapping[str, Sequence[Mapping[str, float]]]) -> Grid:
    """A table of what some methods send, with the number of runs of each row; other methods have no row."""
    body = {name: (str(len(made)), *(cell(made) for cell in columns.values())) for name, made in runs.items()}
    senders = {name.partition(":")[0] for name, cells in body.items() if not {*cells[2:]} <= {"not sent", _UNKNOWN}}
    shown = [(name, *cells) for name, cells in body.items() if name.partition(":")[0] in senders and runs[name]]
    note = "runs with seeds from 0; mean and half of its 95 % t-interval over them"
    return Grid(("", "runs", *columns), tuple(tuple(map(Cell, row)) for row in shown), (note,))


def main() -> None:
    """Make the runs that are missing, and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leakage", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--scenario", default="scenarios/smoke.yaml")
    parser.add_argument("--out", type=Path, default=Path("docs/results/data"), help="folder of the results")
    arguments = parser.parse_args()
    kept = arguments.out / KEPT
    runs: dict[str, dict[str, float]] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    rows = [(method, name) for method in METHODS for name in MITIGATIONS if allowed(method, name)]
    planned = sorted(
        (seed, [*MITIGATIONS].index(name), method, name) for seed in range(arguments.seeds) for method, name in rows
    )
    missing = [(method, name, seed) for seed, _, method, name in planned if run_name(method, name, seed) not in runs]
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        begun = {pool.submit(probed, arguments.scenario, *each): run_name(*each) for each in missing}
        for done in as_completed(begun):
            runs[begun[done]] = done.result()
            print(begun[done], flush=True)
            write(runs, arguments.out, arguments.seeds, rows)


def write(runs: Mapping[str, Mapping[str, float]], out: Path, seeds: int, rows: Sequence[tuple[str, str]]) -> None:
    """Keep the runs that are done, and write the tables of those with the first seeds."""
    (out / KEPT).write_text(json.dumps(dict(sorted(runs.items())), indent=0) + "\n", encoding="utf-8")
    names = {row: [run_name(*row, seed) for seed in range(seeds)] for row in rows}
    by_row = {": ".join(row): [runs[name] for name in each if name in runs] for row, each in names.items()}
    for file, columns in TABLES.items():
        command, grid = f"python -m benchmarks.leakage --seeds {seeds}", table(columns, by_row)
        plain = {"command": command, "table": asdict(grid), "runs": []}
        text = json.dumps(plain, indent=1, ensure_ascii=False) + "\n"
        (out / f"{file}.json").write_text(text, encoding="utf-8")


def run_name(method: str, mitigation: str, seed: int) -> str:
    """Name of a run in the file of the kept ones."""
    return f"{method}, {mitigation}, {seed}"


if __name__ == "__main__":
    main()
