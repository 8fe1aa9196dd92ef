"""A tiny federation without processes or wire: random features, one object per silo, rounds run in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import one_hot

import protocols
from fedmq.config.scenario import Backbone, Objective, ProtocolChoice, Training
from fedmq.data.silo_dataset import CaptionRows, SiloDataset
from fedmq.encoders.base import InputSpec
from fedmq.federation.protocol import Context, FederatedProtocol, Local, SiloFacts, State, Task, Trained, Update
from fedmq.models.build import build
from fedmq.models.two_tower import TwoTower

DIM = 12
LABELS = ("a", "b", "c", "d")
#: objectives of methods that do not suit every base; the others use info_nce
OBJECTIVES = {
    "fedcmr": Objective(base="dscmr", bits=8, hidden=16, leaky=True),
    "fedscmr": Objective(base="dscmr", bits=8, hidden=16, enhance=True),
    "fedcafe": Objective(base="dcmh", bits=8, hidden=16),
    "plfedcmh": Objective(base="shdch", bits=8, hidden=16),
}
#: Kind of adapter of the methods that need a certain one.
ADAPTERS = {"pfedmma": "mma", "ffalora": "lora", "fedsalora": "lora"}
#: paired, image only, text only, paired
MIXED = ((True, True), (True, False), (False, True), (True, True))


def share(silo: SiloFacts, size: int, captions: int = 3) -> SiloDataset:
    generator = torch.Generator().manual_seed(100 + silo.index)
    latent = torch.randn(size, DIM, generator=generator)
    text = latent[:, None] + 0.3 * torch.randn(size, captions, DIM, generator=generator)
    return SiloDataset(
        image=latent + 0.3 * torch.randn(size, DIM, generator=generator) if silo.image else None,
        text=CaptionRows(text.flatten(0, 1), captions * torch.arange(size)) if silo.text else None,
        captions=torch.randint(1, captions + 1, (size,), generator=generator),
        labels=one_hot(latent[:, : len(LABELS)].argmax(1), len(LABELS)).to(torch.uint8),
        rows=torch.arange(size),
    )


def part(items: SiloDataset, rows: slice, *, image: bool, text: bool) -> SiloDataset:
    """Some of a silo's items in some of its modalities."""
    return SiloDataset(
        items.image[rows] if image and items.image is not None else None,
        items.text.of(rows) if text and items.text is not None else None,
        items.captions[rows] if text else torch.ones(len(items.rows[rows]), dtype=torch.int64),
        None if items.labels is None else items.labels[rows],
        items.rows[rows],
    )


def mixed(silo: SiloFacts, pairs: int, image_only: int, text_only: int) -> tuple[SiloDataset, tuple[SiloDataset, ...]]:
    """A silo's pairs, and its items of each kind without a pair."""
    whole, ends = share(silo, pairs + image_only + text_only), (pairs, pairs + image_only)
    alone = (
        part(whole, slice(ends[0], ends[1]), image=True, text=False),
        part(whole, slice(ends[1], None), image=False, text=True),
    )
    return part(whole, slice(0, pairs), image=True, text=True), tuple(each for each in alone if len(each))


@dataclass
class SmallFederation:
    """Silos with their datasets, one model that they use in turn, a protocol and its state."""

    protocol: FederatedProtocol
    context: Context
    model: TwoTower
    shares: Mapping[int, SiloDataset]
    state: State
    personal: dict[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    version: int = 0

    @property
    def eligible(self) -> list[SiloFacts]:
        return [silo for silo in self.context.silos if self.protocol.eligible(silo)]

    def train(self, silo: SiloFacts, learning_rate: float = 1e-3) -> Trained:
        task = Task(self.version + 1, self.version, self.version, learning_rate, self.protocol.task(self.state, silo))
        local = Local(silo, self.shares[silo.index], self.model, self.personal.get(silo.index, {}))
        trained = self.protocol.train(local, task)
        self.personal[silo.index] = trained.state
        return trained

    def reply(self, silo: SiloFacts, trained: Trained, staleness: int = 0, damping: float = 1.0) -> Update:
        return Update(silo, self.version + 1, self.version - staleness, staleness, damping, trained.payloads)

    def replies(self, silos: Sequence[SiloFacts] | None = None) -> list[Update]:
        return [self.reply(silo, self.train(silo)) for silo in (self.eligible if silos is None else silos)]

    def round(self, silos: Sequence[SiloFacts] | None = None) -> Mapping[str, float]:
        merged = self.protocol.merge(self.state, self.replies(silos), self.version)
        self.state, self.version = merged.state, self.version + 1
        return merged.log


def population(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    kinds: Sequence[tuple[bool, bool]] = MIXED,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    training: Training | None = None,
    objective: Objective | None = None,
    labels: tuple[str, ...] = LABELS,
) -> SmallFederation:
    torch.set_num_threads(1)  # as in a silo; on a busy machine two threads spend more time waiting than computing
    silos = tuple(SiloFacts(f"silo-{i:02d}", i, image, text) for i, (image, text) in enumerate(kinds))
    inputs, objective = InputSpec((DIM,), (DIM,)), objective or OBJECTIVES.get(name, Objective())
    if objective.base == "info_nce":
        settings = {"name": "features", "bottleneck": 4, "head_std": 0.2, "adapter": ADAPTERS.get(name, "bottleneck")}
        backbone = Backbone.model_validate(settings)
        model, another = (build(backbone, inputs, seed) for _ in range(2))
    else:
        features = Backbone(name="features")
        model, another = (build(features, inputs, seed, objective=objective, label_names=LABELS) for _ in range(2))
    # The schedule's rates are those of tasks (SmallFederation.train).
    constant = Training(batch_size=8, local_epochs=2, learning_rate=1e-3, schedule="constant", warmup_rounds=0)
    training = training or constant
    facts = (seed, 5, silos, model.layout, model.dim, training, objective, labels)
    public = share(SiloFacts("public", len(silos), True, True), 10)
    context = Context(*facts, public=lambda: public, build=lambda: another)
    protocol = protocols.create(ProtocolChoice(name=name, **(options or {})), context)
    shares = {
        silo.index: share(silo, size) for silo, size in zip(silos, sizes or [11, 9, 7, 5][: len(silos)], strict=True)
    }
    return SmallFederation(protocol, context, model, shares, protocol.initial(model.flat.detach().clone()))


def equal_states(a: State, b: State) -> bool:
    """Whether two states are the same to the bit."""
    return (
        torch.equal(a.theta, b.theta)
        and a.values == b.values
        and a.tensors.keys() == b.tensors.keys()
        and all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    )
