"""What a method keeps on itself is not in a checkpoint: the coordinator names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import protocols
from coordinator.run_context import OwnAttributes
from fedmq.storage.logs import QUIET
from tests import in_process_run
from tests.printed_code import ROOT, file_under
from tests.small_federation import population
from tests.threaded_run import resolved

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "howto" / "own_methods.md"
FEDAVGM = file_under(PAGE, "A method with tensors of its own")
ON_SELF = """
class OnSelf(PROTOCOL):
    def merge(self, state, replies, round_):
        merged = super().merge(state, replies, round_)
        self.last = merged.state.theta
        return merged

PROTOCOL = OnSelf
"""


def write_to_array(method: Any) -> None:
    method.array[0] = 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda method: setattr(method, "number", 2),
    "new": lambda method: setattr(method, "new", torch.zeros(2)),
    "tensor": lambda method: method.tensor.add_(1),
    "array": write_to_array,
    "by_name": lambda method: method.by_name.update(two=2),
    "listed": lambda method: method.listed[0].append(2),
    "inner": lambda method: method.inner.moments.mul_(2),
    "network": lambda method: torch.nn.init.ones_(method.network.weight),
    "generator": lambda method: torch.rand(1, generator=method.generator),
    "numpy_generator": lambda method: method.numpy_generator.random(),
}


class Method:
    """Stands for a method with attributes of all sorts."""

    def __init__(self) -> None:
        self.number, self.nan, self.tensor, self.array = 1, float("nan"), torch.ones(2), np.zeros(2)
        self.by_name, self.listed, self.function = {"one": 1}, [[1]], partial(max, 1)
        self.inner, self.network = SimpleNamespace(moments=torch.ones(2), owner=self), torch.nn.Linear(2, 2)
        self.generator, self.numpy_generator = torch.Generator(), np.random.Generator(np.random.PCG64(0))

    @cached_property
    def derived(self) -> int:
        return self.number + 1


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_attribute_is_named_once(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    method: Any = Method()
    own = OwnAttributes(method)
    assert method.derived == 2
    own.warn_of_changes(QUIET)
    assert capfd.readouterr().err == ""
    CHANGES[name](method)
    own.warn_of_changes(QUIET)
    own.warn_of_changes(QUIET)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: Method changed self.{name}, which no checkpoint contains")
    assert "keep it in State.tensors or State.values (docs/howto/own_methods.md)" in line


def test_fedavgm_of_the_documentation_resumes_to_the_same_model(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fedavgm.py").write_text(FEDAVGM)
    digests = []
    for name, faults in (("whole", "[]"), ("resumed", "[{kind: coordinator_crash, after_round: 2}]")):
        scenario = resolved(tiny, f"protocol={tmp_path / 'fedavgm.py'}", "rounds=3", f"faults={faults}")
        digests.append(in_process_run.run_restarted(scenario, tmp_path / name).summary.model_digest)
    assert digests[0] == digests[1] != in_process_run.run(resolved(tiny), tmp_path / "fedavg").summary.model_digest
    assert "warning" not in capfd.readouterr().err


def test_a_method_with_a_tensor_on_itself_is_named_in_a_run(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(FEDAVGM + ON_SELF)
    in_process_run.run(resolved(tiny, f"protocol={tmp_path / 'mine.py'}"), tmp_path / "run")
    assert capfd.readouterr().err.count("warning: OnSelf changed self.last, which") == 1


@pytest.mark.parametrize("name", protocols.names())
def test_no_method_of_the_project_keeps_anything_on_itself(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = population(name)
    own = OwnAttributes(run.protocol)
    for _ in range(2):
        run.round()
    own.warn_of_changes(QUIET)
    assert capfd.readouterr().err == ""
