"""A silo's own model after its run: what the silo measured at the end, from the personal state in its folder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import save

import protocols
from fedmq.config.resolve import Source, resolve
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError
from fedmq.evaluation.program import HeldOut
from fedmq.federation.population import Population
from fedmq.retrieval.released_model import Own, Release, Retriever
from fedmq.runs.results import read_summary
from fedmq.storage.cache import key_of
from fedmq.wire.messages import Message, digest
from silos.program import Silo, SiloArguments

#: By how much figures of one model may differ from machine to machine, as a share.
_ROUNDING = 1e-6


class _Watched(Mapping[str, torch.Tensor]):
    """A silo's personal tensors, and whether anybody looked at them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self.looked_at = tensors, False

    def __getitem__(self, name: str) -> torch.Tensor:
        self.looked_at = True
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        self.looked_at = True
        return iter(self._tensors)

    def __len__(self) -> int:
        self.looked_at = True
        return len(self._tensors)


def own_of(release: Release, population: Population, message: Message) -> Own:
    """A silo's own model, as the silo measured it.

    Args:
        release: the run, its folder that of the silo, too.
        population: of its scenario.
        message: what the coordinator asked at the end.

    Raises:
        InputError: the model needs a personal state that is not there, or is damaged.
    """
    scenario, root, header = release.scenario, release.run.root, message.header
    run = resolve(Source(release.run.scenario, scenario), protocols, adopt=False)
    # Nothing is sent, so nobody is connected to, no key is needed and no noise is drawn.
    arguments = SiloArguments(run, header.receiver, "", root, root, release.device)
    model = population.build_model(scenario, release.device, MODALITIES)
    silo = Silo(arguments, population, model, noise=scenario.seed)
    kept, stored = silo.store.before(header.sequence + 1), silo.store.newest(header.sequence)
    state = _Watched(kept)
    encoders, towers = silo.own_model(message, state)
    found = Retriever(encoders, towers.binary, towers.dim)
    if stored is None and state.looked_at and _lost(release, silo, found):
        path = release.run.silo_state(header.receiver) / f"task-{header.sequence:09d}.safetensors"
        allowed = "the personal state that the silo kept after its last task: --silo is for where the silo ran"
        raise InputError(str(path), "no such file", allowed)
    held = hashlib.sha256(save(dict(kept))).hexdigest()
    key = key_of("own", release.digest, header.receiver, held, [digest(payload) for payload in message.payloads])
    return Own(header.receiver, key, found)


def _lost(release: Release, silo: Silo, found: Retriever) -> bool:
    """Whether a model made without any personal state is another than the silo measured at the end.

    It need not be: a method may keep nothing for a silo yet, as RCSR-p before its onset.
    """
    summary, name = read_summary(release.run), silo.facts.name
    shared, told = summary.per_silo[name], summary.personal_per_silo.get(name)
    if not shared.participations:
        return False
    if told is None:
        return True
    if _alike(told, shared.figures):
        return False
    heldout = HeldOut.load(release.scenario, silo.population)
    return not _alike(told, heldout.measured(found.encoders, binary=found.binary, names=(name,)).per_silo[name])


def _alike(told: Mapping[str, float], others: Mapping[str, float]) -> bool:
    return all(math.isclose(value, others.get(name, math.nan), rel_tol=_ROUNDING) for name, value in told.items())
