"""Write the released model of a finished run: its parameters, its configuration and its model card.

The folder is enough to build and apply the model; it needs neither the run folder nor the training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from coordinator.run_context import RunContext
from fedmq.config.scenario import Scenario
from fedmq.data import catalogue
from fedmq.federation.population import Population
from fedmq.runs.model_card import model_card
from fedmq.runs.run_records import ReleaseConfig, ReleasedInputs, RunSummary
from fedmq.storage.run_folder import write_atomically, write_json, write_tensors, write_text
from fedmq.wire.payloads import Payload, digest


def write_model(
    run_context: RunContext, theta: torch.Tensor, more: tuple[Payload, ...], population: Population
) -> ReleaseConfig:
    """Write the released model, further payloads that inference needs, and ``config.json``, which describes them.

    Args:
        run_context: fixed facts of the run.
        theta: the model's parameters, float32 [P].
        more: payloads released with the model.
        population: the silos and their data.
    """
    layout, folder, scenario = run_context.context.layout, run_context.folder.model, run_context.scenario
    tensors = {name: torch.from_numpy(view.copy()) for name, view in layout.views(theta.numpy()).items()}
    write_atomically(folder / "model.safetensors", partial(_write_released, tensors=tensors))
    for payload in more:
        arrays = {name: torch.tensor(value) for name, value in vars(payload).items() if isinstance(value, np.ndarray)}
        write_atomically(folder / f"{payload.KIND}.safetensors", partial(_write_released, tensors=arrays))
    prepared = population.prepared
    inputs = prepared.inputs
    config = ReleaseConfig(
        backbone=scenario.backbone.model_dump(mode="json"),
        objective=scenario.objective.model_dump(mode="json"),
        protocol=scenario.protocol.name,
        dim=run_context.context.dim,
        layout_digest=layout.digest,
        # The safetensors file does not keep the order of the parameters, which is needed to verify the digests.
        layout=[entry.name for entry in layout.entries],
        model_digest=layout.model_digest(theta.numpy()),
        data_digest=prepared.content,
        released_with={payload.KIND: digest(payload) for payload in more},
        seed=scenario.seed,
        inputs=ReleasedInputs(
            image_shape=list(inputs.image_shape),
            text_shape=list(inputs.text_shape),
            image_dtype=inputs.image_dtype,
            text_dtype=inputs.text_dtype,
            mean=list(inputs.mean),
            std=list(inputs.std),
        ),
        label_names=list(prepared.label_names),
        texts="vectors" if scenario.backbone.name == "features" else catalogue.text_kind(scenario.data),
        frozen=_frozen(scenario, population),
        personal_only=run_context.traits.personal_only,
    )
    write_json(folder / "config.json", config.plain())
    return config


def write_card(run_context: RunContext, config: ReleaseConfig, summary: RunSummary) -> None:
    """Write the model card, ``model/README.md``."""
    scenario = run_context.scenario
    text = model_card(config, summary, scenario.protocol.label, scenario.evaluation.split)
    write_text(run_context.folder.model / "README.md", text)


def _frozen(scenario: Scenario, population: Population) -> dict[str, str]:
    """Digests of the frozen encoders that encoded the data, as the prepared data record them."""
    weights = population.prepared.meta.source.get("weights")
    found = dict(zip(("image", "text"), weights, strict=True)) if isinstance(weights, list) else {}
    digests = {modality: value for modality, value in found.items() if isinstance(value, str)}
    if digests and scenario.backbone.adapter_site == "blocks":
        from fedmq.encoders.clip_weights import weights_digest  # noqa: PLC0415 - open_clip is slow to import

        # The encoders then only decode pictures and tokenise captions; the frozen weights are applied by the model.
        digests["blocks"] = weights_digest(scenario.backbone, scenario.seed, population.cache)
    return digests


def _write_released(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file with the usual permissions; the library makes it readable by its owner only."""
    path.touch()
    usual = path.stat().st_mode
    write_tensors(path, tensors)
    path.chmod(usual)
