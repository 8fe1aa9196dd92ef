"""Traits of a method: programs rely on them only, and a trait that the method does not satisfy is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import protocols
from fedmq.config import plug_ins
from fedmq.config.scenario import ProtocolChoice
from fedmq.errors import InputError
from fedmq.federation.protocol import FederatedProtocol, NoOptions, Traits
from protocols import check_traits, class_problem
from protocols.fedavg import AnchoredFedAvg, AnchoredOptions
from tests import in_process_run
from tests.small_federation import population
from tests.threaded_run import resolved

#: A method in a user's file: FedAvg with extra attributes whose names resemble traits.
MINE = '''"""Mine: FedAvg with attributes of any name."""

from protocols.fedavg import AnchoredFedAvg

class Mine(AnchoredFedAvg):
    layers = ("a", "b")
    personalised = True
    pooled = True
    reply_bytes = 1 << 40

PROTOCOL = Mine
'''


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a method's text to ``mine.py`` and returns its reference."""

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return plug_ins.adopt(tmp_path / "mine.py")

    return write


def test_a_methods_attributes_may_have_any_names(mine: Callable[[str], str], tiny: Path, tmp_path: Path) -> None:
    name = mine(MINE)
    plain = in_process_run.run(resolved(tiny, "protocol={name: fedavg}"), tmp_path / "fedavg").summary.plain()
    summary = in_process_run.run(resolved(tiny, f"protocol={{name: {name}}}"), tmp_path / "mine").summary.plain()
    assert summary["model_digest"] == plain["model_digest"]
    assert summary["per_silo"] == plain["per_silo"]  # participations among them
    assert summary["messages"] == plain["messages"]
    assert "personal_only" not in summary
    assert "personal" not in summary


class Claiming(AnchoredFedAvg):
    """FedAvg with the traits that a test sets."""

    said = Traits()
    said_before = Traits()

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        return cls.said_before

    def traits(self) -> Traits:
        return self.said


@pytest.mark.parametrize(
    ("now", "before", "told"),
    [
        (Traits(personalised=True), Traits(), "personalised without encoders"),
        (Traits(personal_only=True), Traits(personal_only=True), "personal_only without personalised"),
        (Traits(pooled=True), Traits(), "pooled True, but traits_of says False"),
        (Traits(), Traits(personal_only=True), "personal_only False, but traits_of says True"),
        (Traits(shared_layers=("visual.head.0.weight",)), Traits(), "without a PartialDelta"),
    ],
)
def test_a_trait_that_a_method_does_not_satisfy_is_refused_in_one_line(now: Traits, before: Traits, told: str) -> None:
    kind = type("Claims", (Claiming,), {"said": now, "said_before": before})
    context = population("fedavg").context
    with pytest.raises(InputError, match=told) as caught:
        check_traits("mine", kind(AnchoredOptions(), context), AnchoredOptions(), context)
    assert str(caught.value).startswith("protocol mine: traits: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [(), ("no.such.layer",), None])
def test_shared_layers_must_be_the_models_layers_in_its_order(layers: tuple[str, ...] | None) -> None:
    run = population("fedper")
    shared = run.protocol.traits().shared_layers
    assert shared is not None
    wrong = shared[::-1] if layers is None else layers
    said = Traits(personal_only=True, personalised=True, shared_layers=wrong)
    method = type("Wrong", (type(run.protocol),), {"traits": lambda self: said})
    options = protocols.options_of(type(run.protocol), {})
    with pytest.raises(InputError, match="shared_layers"):
        check_traits("fedper", method(options, run.context), options, run.context)


def test_a_file_without_a_method_is_refused_when_it_is_loaded(mine: Callable[[str], str]) -> None:
    name = mine("from fedmq.federation.protocol import FederatedProtocol\nclass PROTOCOL(FederatedProtocol): pass\n")
    with pytest.raises(InputError, match=r"mine\.py: PROTOCOL: .*class PROTOCOL without .*initial.*merge.*train"):
        protocols.load(name)


def test_a_method_whose_init_keeps_no_options_is_told_to_call_that_of_its_base(mine: Callable[[str], str]) -> None:
    own = "\n    def __init__(self, options, context):\n        self.context = context\n"
    name = mine(f"from protocols.fedavg import FedAvg\nclass PROTOCOL(FedAvg):{own}")
    with pytest.raises(InputError, match=r"super\(\).__init__"):
        protocols.create(ProtocolChoice(name=name), population("fedavg").context)


@dataclass(frozen=True)
class Undecided:
    """Options with one field without default."""

    strength: float


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (int, "class int, which is no subclass of FederatedProtocol"),
        ("mine", "an object of type str, no class"),
        (type("Mine", (AnchoredFedAvg,), {"Options": int}), "class Mine, whose Options are not a dataclass"),
        (
            type("Mine", (AnchoredFedAvg,), {"Options": Undecided}),
            "Options are a dataclass without a default for strength",
        ),
        (AnchoredFedAvg, None),
    ],
)
def test_class_problem_explains_why_an_object_is_not_a_method(given: object, told: str | None) -> None:
    problem = class_problem(given)
    assert problem is None if told is None else told in str(problem)


def test_the_hooks_of_a_method_without_traits_do_nothing() -> None:
    run = population("fedavg")
    assert run.protocol.traits() == Traits() == type(run.protocol).traits_of(AnchoredOptions())
    assert run.protocol.release(run.state) == ()
    after = run.protocol.merge(run.state, run.replies(), 0).state
    assert run.protocol.mix_state(run.state, after, 0.5) is after
    assert FederatedProtocol.Options is NoOptions


def test_a_method_in_a_file_is_created_by_its_reference(mine: Callable[[str], str]) -> None:
    name = mine('"""Mine: paired silos alone."""\nfrom protocols.fedavg import AnchoredFedAvg\n'
         "class PROTOCOL(AnchoredFedAvg):\n    def eligible(self, silo):\n        return silo.paired\n")  # fmt: skip
    context = population("fedavg").context
    method = protocols.create(ProtocolChoice(name=name, tau=0.1), context)
    assert [silo.index for silo in context.silos if method.eligible(silo)] == [0, 3]
