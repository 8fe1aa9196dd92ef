"""Write the released model of a finished run: its parameters, its configuration and its model card.

The folder is enough to build and apply the model; it needs neither the run folder nor the training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from coordinator.model_selection import BestModel
from coordinator.run_context import RunContext
from fedmq.config.scenario import Scenario
from fedmq.data import catalogue
from fedmq.federation.agreement import RunData
from fedmq.federation.protocol import State
from fedmq.runs.model_card import model_card
from fedmq.runs.release import ReleaseConfig, ReleasedInputs
from fedmq.runs.run_records import RunSummary
from fedmq.storage.run_folder import RunFolder, write_atomically, write_json, write_tensors, write_text
from fedmq.wire.payload_digest import digest
from fedmq.wire.payloads import Payload


def write_model(
    run_context: RunContext, theta: torch.Tensor, more: tuple[Payload, ...], data: RunData
) -> ReleaseConfig:
    """Write the released model, further payloads that inference needs, and ``config.json``, which describes them.

    Args:
        run_context: fixed facts of the run.
        theta: the model's parameters, float32 [P].
        more: payloads released with the model.
        data: the run's data.
    """
    layout, folder, scenario = run_context.context.layout, run_context.folder.model, run_context.scenario
    tensors = {name: torch.from_numpy(view.copy()) for name, view in layout.views(theta.numpy()).items()}
    write_atomically(folder / "model.safetensors", partial(_write_released, tensors=tensors))
    for payload in more:
        arrays = {name: torch.tensor(value) for name, value in vars(payload).items() if isinstance(value, np.ndarray)}
        write_atomically(folder / f"{payload.KIND}.safetensors", partial(_write_released, tensors=arrays))
    inputs = data.inputs
    config = ReleaseConfig(
        backbone=scenario.backbone.model_dump(mode="json"),
        objective=scenario.objective.model_dump(mode="json"),
        protocol=scenario.protocol.name,
        dim=run_context.context.dim,
        layout_digest=layout.digest,
        # The safetensors file does not keep the order of the parameters, which is needed to verify the digests.
        layout=[entry.name for entry in layout.entries],
        model_digest=layout.model_digest(theta.numpy()),
        data_digest=data.content,
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
        label_names=list(data.label_names),
        texts="vectors" if scenario.backbone.name == "features" else _texts(scenario, data),
        frozen=_frozen(scenario, data),
        personal_only=run_context.traits.personal_only,
    )
    write_json(folder / "config.json", config.plain())
    return config


def best_model(run_context: RunContext, data: RunData) -> BestModel | None:
    """Keeps the best version, if the scenario asks for it."""
    if run_context.scenario.evaluation.keep == "last":
        return None

    def write(folder: RunFolder, state: State) -> str:
        into = replace(run_context, folder=folder)
        more = run_context.protocol.release(state)
        return write_model(into, state.theta, more, data).model_digest

    return BestModel(run_context, write)


def write_card(run_context: RunContext, config: ReleaseConfig, summary: RunSummary) -> None:
    """Write the model card, ``model/README.md``."""
    scenario = run_context.scenario
    text = model_card(config, summary, scenario.protocol.label, scenario.evaluation.split)
    write_text(run_context.folder.model / "README.md", text)


def _texts(scenario: Scenario, data: RunData) -> Literal["sentences", "bag"]:
    """The texts that the model reads, of data that are not vectors."""
    if scenario.data is not None:
        return catalogue.text_kind(scenario.data)
    return "bag" if data.vocabulary else "sentences"


def _frozen(scenario: Scenario, data: RunData) -> dict[str, str]:
    """Digests of the frozen encoders that encoded the data, as the prepared data record them."""
    digests = dict(data.encoders)
    if digests and scenario.backbone.adapter_site == "blocks":
        from fedmq.encoders.clip_weights import weights_digest  # noqa: PLC0415 - open_clip is slow to import

        # The encoders then only decode pictures and tokenise captions; the frozen weights are applied by the model.
        digests["blocks"] = weights_digest(scenario.backbone, scenario.seed, data.cache)
    return digests


def _write_released(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file with the usual permissions; the library makes it readable by its owner only."""
    path.touch()
    usual = path.stat().st_mode
    write_tensors(path, tensors)
    path.chmod(usual)
