"""What a finished run releases: its model with its configuration and card, the best version, and personal models.

The folder is enough to build and apply the model; it needs neither the run folder nor the training data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from coordinator import checkpoints
from coordinator.data_admission import OwnDataAdmission
from coordinator.rounds import Rounds
from coordinator.run_context import RunContext, run_context_of
from fedmq.config.scenario import Scenario
from fedmq.data import catalogue
from fedmq.errors import InputError
from fedmq.evaluation.recall import HEADLINE
from fedmq.federation.agreement import RunData
from fedmq.federation.population import Population, run_name
from fedmq.federation.protocol import State
from fedmq.retrieval.released_model import Release
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.release import OtherModelError, ReleaseConfig, ReleasedInputs
from fedmq.runs.run_records import BestVersion, EvaluationLine, MetricsLine
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, write_atomically, write_json, write_tensors
from fedmq.wire.codec import digest
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message
from fedmq.wire.payloads import Metrics, Payload

#: Permissions of released files, before the umask.
_PUBLIC = 0o666


def patience_over(lines: Iterable[MetricsLine], patience: int | None) -> bool:
    """Whether the last ``patience`` evaluations had no higher mean R@1 than one before them."""
    if patience is None:
        return False
    evaluated = {line.version: line.metrics[HEADLINE] for line in lines if isinstance(line, EvaluationLine)}
    values = [evaluated[version] for version in sorted(evaluated)]
    return bool(values) and len(values) - 1 - values.index(max(values)) >= patience


class BestModel:
    """Keeps the version with the highest mean R@1 in ``best/`` of the run folder; the earliest of equal ones.

    Raises:
        InputError: the record of an earlier process is damaged.
    """

    def __init__(self, run_context: RunContext, data: RunData) -> None:
        path = run_context.folder.root / "best" / "best.json"  # the model is in ``model/`` next to it
        self._path, self._data = path, data
        self._run_context = replace(run_context, folder=RunFolder(path.parent))
        allowed = "the record of a run's best version"
        self.best = read_json(path, BestVersion, allowed) if path.exists() else None

    def evaluated(self, version: int, metrics: Metrics, state: State) -> None:
        """Keep a version if it is the best one so far on the validation split."""
        value = metrics.values[HEADLINE]
        if self.best is not None and value <= self.best.value:
            return
        more = self._run_context.protocol.release(state)
        digest = write_model(self._run_context, state.theta, more, self._data).model_digest
        self.best = BestVersion(version=version, metric=HEADLINE, value=value, model_digest=digest)
        write_json(self._path, self.best.plain())


def write_model(
    run_context: RunContext, theta: torch.Tensor, more: tuple[Payload, ...], data: RunData
) -> ReleaseConfig:
    """Write the model (float32 [P]), further payloads that inference needs, and ``config.json`` about them."""
    layout, folder, scenario = run_context.context.layout, run_context.folder.model, run_context.scenario
    tensors = {name: torch.from_numpy(view.copy()) for name, view in layout.views(theta.numpy()).items()}
    write_atomically(folder / "model.safetensors", partial(write_tensors, tensors=tensors, mode=_PUBLIC))
    for payload in more:
        arrays = {name: torch.tensor(value) for name, value in vars(payload).items() if isinstance(value, np.ndarray)}
        write_atomically(folder / f"{payload.KIND}.safetensors", partial(write_tensors, tensors=arrays, mode=_PUBLIC))
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

        # The encoders then only decode images and tokenise captions; the frozen weights are applied by the model.
        digests["blocks"] = weights_digest(scenario.backbone, scenario.seed, data.cache)
    return digests


def final_evaluation_request(release: Release, population: Population, silo: str) -> Message:
    """The request that had a silo evaluate its personal model, with the payloads of a task of the final version.

    Raises:
        InputError: the method has no personal models, or the checkpoint is missing, damaged or of other data.
        OtherModelError: the checkpoint has another model than the released one.
    """
    scenario, folder = release.scenario, release.run
    data = population.counted(scenario) if population.agreed is None else _agreed(release)
    run_context, _ = run_context_of(scenario, data, folder)
    if not run_context.traits.personalised:
        method = scenario.protocol.label
        allowed = f"the shared model: with this run's options silos of {method} have no personal models"
        raise InputError(str(folder.root), f"no personal model of {silo}", allowed)
    saved = checkpoints.load(folder.checkpoints)
    if saved is None:
        allowed = "the last checkpoint of the run; use --silo on the machine where the coordinator and the silo ran"
        raise InputError(str(folder.checkpoints), "no checkpoint", allowed)
    checkpoints.check_fits(folder.checkpoints, saved, scenario.rounds, scenario.silo_names)
    if saved.data != run_context.data:
        found = f"data of other content than the run was made with ({run_context.data[:12]})"
        raise InputError(f"{folder.root}: the data", found, f"the run's data ({saved.data[:12]})")
    rounds = Rounds.from_record(run_context.plan, saved.rounds)
    state = saved.states[rounds.version]
    digest = run_context.context.layout.model_digest(state.theta.numpy())
    if digest != release.files.used:
        raise OtherModelError(folder.checkpoints / f"version-{rounds.version:06d}", digest, release.files.used)
    sequence, version = rounds.committed.get(silo, 0), rounds.version
    header = Header(
        run=run_name(scenario),
        kind=Kind.EVALUATE,
        sender=COORDINATOR,
        receiver=silo,
        sequence=sequence,
        sent_at=0.0,
        base_version=version,
    )
    return Message(header, run_context.task(state, run_context.facts_at(silo, version)))


def _agreed(release: Release) -> RunData:
    """The facts about the data of a run on sites' own data."""
    scenario = release.scenario
    known = read_json(release.run.agreement, AgreementRecord, "what the silos of this run agreed on")
    minimum = scenario.participation.minimum
    run = run_name(scenario)
    admission = OwnDataAdmission(scenario.silo_names, run, evaluator=scenario.evaluator, known=known, minimum=minimum)
    return admission.run_data(release.cache)
