"""A run with and without secure sums: time and bytes of a round in which a fifth of the silos drops out of the sum."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml

from benchmarks.measure import Number, Result, spread
from benchmarks.runs import loop_seconds, simulated, synthetic_features
from fedmq.runs.profile import Profile, read
from fedmq.runs.results import read_summary
from fedmq.runs.run_records import RunSummary
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.payloads import Delta, MaskedUpdate

#: Number of silos; width of images and texts, of which a model of 12.1 MB follows; number of rounds; of runs of each.
SILOS, WIDTH, ROUNDS, REPEATS = 30, 838, 6, 3
#: Training items of each silo: one step, so that a round is mostly messages and sums.
_ITEMS = 20
_SUMS = "privacy.secure_aggregation=true"


def _scenario(folder: Path, silos: int, width: int, rounds: int) -> Path:
    """Write FedAvg on synthetic features; every silo takes part in every round."""
    scenario: dict[str, object] = {
        "name": "sums",
        "rounds": rounds,
        "participation": 1.0,
        "protocol": {"name": "fedavg"},
        **synthetic_features(folder / "items.npz", train=_ITEMS * silos, test=silos, width=width),
        "silos": {"count": silos},
        "partition": {"kind": "iid"},
        "training": {"learning_rate": 1.0e-3, "batch_size": _ITEMS, "warmup_rounds": 0},
        "evaluation": {"every": 0},
    }
    path = folder / "sums.yaml"
    path.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    return path


def _bytes(summary: RunSummary) -> int:
    """Bytes that all silos sent and received together."""
    return sum(summary.bytes.up.values()) + sum(summary.bytes.down.values())


def run(*, smoke: bool = False) -> Result:
    """Measure the runs alternately; ``smoke``: once, with five silos and a small model."""
    silos, width, rounds, repeats = (5, 32, 3, 1) if smoke else (SILOS, WIDTH, ROUNDS, REPEATS)
    gone = [f"silo-{number:02d}" for number in range(0, silos, 5)]
    dropping = f"faults=[{{kind: drop, step: mask, silos: [{', '.join(gone)}]}}]"
    settings = {"plain": (), "with sums": (_SUMS,), "with sums, a fifth drops out": (_SUMS, dropping)}
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    summaries, silo_s, coordinator_s = dict[str, RunSummary](), dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        file = _scenario(folder, silos, width, rounds)
        for repeat in range(repeats):
            for kind, given in settings.items():
                out = folder / f"{kind.replace(' ', '-')}-{repeat}"
                simulated(file, out, *given, options=("--profile",))
                summaries[kind] = read_summary(RunFolder(out))
                seconds[kind].append(loop_seconds(out) / rounds)
                profile = Profile.of(read(RunFolder(out).profile))
                silo_s[kind] = profile.of_all(profile.silos)["compute"] / rounds
                coordinator_s[kind] = profile.of_all(["coordinator"])["merge"] / rounds
    numbers = [spread(f"{kind}: a round", found, "s") for kind, found in seconds.items()]
    last = "with sums, a fifth drops out"
    more = [mine - other for mine, other in zip(seconds[last], seconds["plain"], strict=True)]
    numbers.append(spread("  more than plain", more, "s", "at most 3 s"))
    plain, sums = summaries["plain"], summaries[last]
    arriving = _bytes(plain) - len(gone) / silos * plain.bytes.up[Delta.KIND]  # with as many updates as the sums get
    ratio = _bytes(sums) / arriving
    numbers.append(Number("  bytes, to plain with as many updates", ratio, "x", "at most 1.02"))
    numbers += [
        Number(f"{kind}: silos compute", each, "s per round, wall time added up") for kind, each in silo_s.items()
    ]
    numbers += [Number(f"{kind}: coordinator merges", each, "s per round") for kind, each in coordinator_s.items()]
    model = sums.bytes.up[MaskedUpdate.KIND] / rounds / (silos - len(gone)) / 1e6
    note = f"fedavg, {silos} silos as processes, masked updates of {model:.2f} MB, {rounds} rounds of one step"
    return Result("sums", tuple(numbers), (note,))
