"""Fabricated run summaries and configurations of released models."""

from __future__ import annotations

from fedmq.runs.release import ReleaseConfig, ReleasedInputs
from fedmq.runs.run_records import Processes, RunSummary, Seconds, SiloSummary, Traffic


def summary(**facts: object) -> RunSummary:
    """A small summary with these keys added or replaced."""
    silo: dict[str, object] = {
        "modalities": ["image", "text"],
        "samples": 9,
        "participations": 1,
        "tasks": 1,
        "heldout": 3,
    }
    silo |= {"i2t_medr": 1.0, "mean_r1": 0.5}
    made = RunSummary(
        protocol="fedavg",
        scenario="tiny",
        seed=0,
        rounds=2,
        versions=2,
        model_digest="ab" * 32,
        metrics={"i2t_medr": 1.0, "mean_r1": 0.5},
        per_silo={"silo-00": SiloSummary.model_validate(silo)},
        fairness={"std_r1": 0.0, "worst_r1": 0.5, "gap_r1": 0.0},
        bytes=Traffic(up={"delta": 100, "loss": 8}, down={"model": 50}),
        seconds=Seconds(total=1.0, virtual=3.0),
        processes=Processes(silos=1),
        versions_of={"fedmq": "0.1.0"},
    )
    return made.model_copy(update=facts)


def release_config(**facts: object) -> ReleaseConfig:
    """The configuration of a small released model with these keys added or replaced."""
    inputs = ReleasedInputs(image_shape=[24], text_shape=[24], image_dtype="float32", text_dtype="float32")
    config = ReleaseConfig(
        backbone={"name": "features", "pretrained": None, "bottleneck": 4},
        objective={"base": "info_nce"},
        protocol="fedavg",
        dim=24,
        layout_digest="ab" * 32,
        layout=["head"],
        model_digest="cd" * 32,
        released_with={},
        seed=0,
        inputs=inputs,
        texts="vectors",
    )
    return config.model_copy(update=facts)
