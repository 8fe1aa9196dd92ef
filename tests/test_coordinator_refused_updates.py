"""Whichever updates are refused: a run fails exactly if no silo trained, and names the silos that never did."""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from fedmq.cli.terminal import print_summary
from fedmq.config.scenario import Scenario
from fedmq.errors import RunError
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Delta, Payload
from silos.tasks import Silo
from tests import in_process_run
from tests.threaded_run import resolved

pytestmark = pytest.mark.slow

SILOS, ROUNDS = 4, 2
#: For each silo, whether its update diverges in each round.
Diverging = tuple[tuple[bool, ...], ...]
NEVER: Diverging = ((False,) * ROUNDS,) * SILOS
ALWAYS: Diverging = ((True,) * ROUNDS,) * SILOS


@pytest.fixture(scope="module")
def scenario(tiny: Path) -> Scenario:
    """Each silo has both modalities, so that each trains in each round."""
    changes = ("participation=1", "protocol=fedavg", "evaluation.every=0", "missing_modality.silos={}")
    return resolved(tiny, f"rounds={ROUNDS}", *changes)


def with_longer_updates(diverging: Diverging, patch: pytest.MonkeyPatch) -> None:
    """Let silos send updates that are too long to be accepted, as they are when training diverges."""
    respond = Silo.respond

    def diverged(silo: Silo, message: Message) -> tuple[Payload, ...]:
        payloads = respond(silo, message)
        if message.header.kind is not Kind.TASK or message.task is None:
            return payloads
        if not diverging[silo.facts.index][message.task.round]:
            return payloads
        (delta,) = (each for each in payloads if isinstance(each, Delta))
        longer = replace(delta, buffer=np.full_like(np.asarray(delta.buffer), 1e12))
        return tuple(longer if each is delta else each for each in payloads)

    patch.setattr(Silo, "respond", diverged)


@given(st.tuples(*[st.tuples(*[st.booleans()] * ROUNDS)] * SILOS))
@example(NEVER)
@example(ALWAYS)
@example(((True, False),) * SILOS)
@example(((False, True),) * SILOS)
@example(((True, True), *NEVER[1:]))
@settings(max_examples=2)
def test_a_run_fails_if_a_round_trains_no_silo_and_otherwise_names_silos_refused_throughout(
    scenario: Scenario, diverging: Diverging
) -> None:
    untrained = [all(silo[round_] for silo in diverging) for round_ in range(ROUNDS)]
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        with_longer_updates(diverging, patch)
        folder = RunFolder(Path(base) / "run")
        if any(untrained):
            with pytest.raises(RunError, match=r"no silo could train .*was refused.*lower training\.learning_rate"):
                in_process_run.run(scenario, folder.root)
            assert not folder.summary.exists() and not folder.model.exists()
            return
        written = in_process_run.run(scenario, folder.root).summary
        screen = io.StringIO()
        print_summary(written, folder, Console(file=screen, width=200))
    refused = {f"silo-{index:02d}": sum(rounds) for index, rounds in enumerate(diverging) if any(rounds)}
    assert {name: each.refused for name, each in written.unusable_replies.items()} == refused
    throughout = [name for name, number in refused.items() if number == ROUNDS]
    assert list(written.never_merged) == throughout
    last = screen.getvalue().splitlines()[-max(1, len(throughout)) :]
    assert [line.partition(":")[0] for line in last if "none of its replies was merged" in line] == throughout
