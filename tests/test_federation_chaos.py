"""Random fault scripts, and a coordinator killed after every event: no run hangs, no reply counts twice, no merge is
lost, and every run is reproducible. ``make chaos`` runs 200 scripts instead of 10 (FEDMQ_CHAOS).
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator import loop
from coordinator.round_events import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.audit.replay import first_difference, read_record
from fedmq.config.scenario import Scenario
from fedmq.errors import RunError
from fedmq.storage.run_folder import RunFolder
from fedmq.wire import channel
from tests.in_process_run import lines, run_restarted
from tests.threaded_run import resolved, run

SCRIPTS = int(os.environ.get("FEDMQ_CHAOS", "10"))
#: Virtual seconds of a run: tasks take a fraction of one, absences and delays a few.
HORIZON = 20.0
LONGEST = 60.0

seconds = st.floats(0.1, 5.0).map(lambda value: round(value, 2))
windows = st.tuples(st.floats(0.0, HORIZON), st.floats(0.5, HORIZON)).map(
    lambda pair: [round(pair[0], 2), round(pair[0] + pair[1], 2)]
)
where = st.fixed_dictionaries(
    {},
    optional={
        "silos": st.sampled_from(["all", "paired", "image_only", ["silo-00"], ["silo-01", "silo-03"]]),
        "share": st.sampled_from([0.3, 0.7]),
        "rounds": st.sampled_from([[0], [1, 3], "1-", "0-2"]),
    },
)
when = st.fixed_dictionaries({}, optional={"time": windows, "probability": st.sampled_from([0.2, 0.5, 0.9])})


def kind(name: str, **options: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({"kind": st.just(name), **options})


TASKS = st.one_of(
    kind("late", seconds=seconds),
    kind("drop", again=st.one_of(st.none(), seconds)),
    kind("crash", restart=seconds),
    kind("freeze", seconds=seconds),
    *(kind(name) for name in ("duplicate", "reorder", "corrupt")),
    *(kind(name) for name in ("sign_flip", "scaled", "noise", "nan", "prototype_poisoning")),
)
STANDING = st.one_of(
    kind("drift"),
    kind("label_noise"),
    kind("modality_lost", modality=st.just("text"), silos=st.just(["silo-00"])),
    kind("modality_gained", modality=st.just("image"), silos=st.just(["silo-03"])),
)
ONCE = st.one_of(
    kind("coordinator_crash", after_event=st.integers(1, 12)),
    kind("coordinator_crash", after_round=st.integers(1, 3)),
    kind("disk_full", round=st.integers(1, 4), times=st.integers(1, 4)),
    kind("split", time=windows),
    kind("leave", time=windows),
    kind("leave", every=st.just(8.0), away=st.floats(1.0, 6.0)),
)
FAULT = st.one_of(
    st.tuples(TASKS, where, when).map(lambda parts: {**parts[1], **parts[2], **parts[0]}),
    st.tuples(STANDING, where).map(lambda parts: {**parts[1], **parts[0]}),
    ONCE,
)
SCRIPT = st.lists(FAULT, min_size=1, max_size=5)
MODES = st.sampled_from(
    [
        ("aggregation.mode=sync",),
        ("aggregation={mode: sync, deadline: 1.0, quorum: 0.5}",),
        ("aggregation={mode: buffered, buffer: 2, balance: 10}",),
        ("aggregation={mode: async, max_staleness: 4, balance: 4}",),
        ("aggregation={mode: sync, robust: {rule: median}}",),
    ]
)


def trained_nothing(scenario: Scenario, out: Path) -> str | None:
    """Run a scenario to its end; the error if its faults left nothing that was trained."""
    try:
        assert run_restarted(scenario, out).phase is Phase.DONE
    except RunError as error:
        assert str(error).startswith("no silo trained: ")
        return str(error)
    return None


def sane(out: Path, rounds: int) -> None:
    """Assert that no merge is lost or duplicated and that no reply is in two merges."""
    merges = lines(out, "merge")
    assert [line["version"] for line in merges] == list(range(1, rounds + 1))
    arrived = Counter(
        (event["silo"], event["sequence"])
        for event in read_record(RunFolder(out)).events
        if event["event"] == "arrived"
    )
    assert all(count == 1 for count in arrived.values())
    assert sum(len(line["replies"]) for line in merges) <= len(arrived)
    assert not audit_run(out).findings


@pytest.mark.longest
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(
    max_examples=SCRIPTS,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(faults=SCRIPT, mode=MODES)
def test_under_random_faults_a_run_ends_and_is_reproducible(
    faults: list[dict[str, object]], mode: tuple[str, ...], tiny: Path
) -> None:
    scenario = resolved(tiny, "participation=1.0", *mode)
    scenario = Scenario.model_validate({**scenario.model_dump(), "faults": faults})
    with tempfile.TemporaryDirectory() as name:
        began = time.process_time()
        first, second = Path(name) / "first", Path(name) / "second"
        if (error := trained_nothing(scenario, first)) is not None:
            assert trained_nothing(scenario, second) == error
            return
        sane(first, scenario.rounds)
        assert trained_nothing(scenario, second) is None
        assert first_difference(read_record(RunFolder(first)), read_record(RunFolder(second))) is None
        assert time.process_time() - began < LONGEST


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(
    max_examples=max(3, SCRIPTS // 20),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(faults=st.lists(st.tuples(TASKS, where, when).map(lambda p: {**p[1], **p[2], **p[0]}), min_size=1, max_size=3))
def test_sealed_messages_and_in_process_calls_give_the_same_events_and_model(
    faults: list[dict[str, object]], tiny: Path
) -> None:
    scenario = resolved(tiny, "participation=1.0")
    scenario = Scenario.model_validate({**scenario.model_dump(), "faults": faults})
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        for module in (channel, loop):
            patch.setattr(module, "BEAT_SECONDS", 0.2)
        sent, called = Path(name) / "sent", Path(name) / "called"
        if (error := trained_nothing(scenario, called)) is not None:
            # A busy machine answers late, and what is sent again is refused.
            with pytest.raises(RunError, match=re.escape(error).replace(r"\(", r"\((duplicate \d+, )?", 1)):
                run(scenario, sent)
            return
        assert run(scenario, sent).phase is Phase.DONE
        sane(sent, scenario.rounds)
        one, other = read_record(RunFolder(sent)), read_record(RunFolder(called))
        assert one.events == other.events
        assert one.digest == other.digest
