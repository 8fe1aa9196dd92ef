"""``fedmq preflight --site``: whether a site's data fit those of the others, without stating them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from fedmq.federation.preflight import Program, Result, Verdict
from fedmq.launch.preflight import CHECKS, Starting, preflight
from fedmq.packages import __version__
from fedmq.runs.status import status_of
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.inquiry import ask_status
from fedmq.wire.keys import Identity, accept_key, load_accepted, load_identity, new_key
from silos.tasks import SiloArguments
from tests.own_data_sites import arrays, of_hospital
from tests.own_data_threads import OwnRun
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow
LATE = "silo-02"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRun]:
    """A coordinator to which two of three sites have stated their data."""
    run, over = OwnRun(tmp_path_factory.mktemp("fit"), {"rounds": 1}), threading.Event()
    accept_key(run.root / "keys", "operator", new_key(run.root / "keys", "operator").key.public_key())
    options = {"listening": lambda: run.start("silo-00", "silo-01"), "stop_wanted": over.is_set}
    thread = threading.Thread(target=run.coordinate, kwargs=options)
    thread.start()
    wait_for(lambda: run.stated("silo-00") and run.stated("silo-01"))
    yield run
    # The run ends once the third site has joined.
    run.start(LATE)
    thread.join(PATIENCE)
    over.set()
    thread.join()


def silo_key(keys: Path) -> Identity:
    return load_identity(keys, LATE)


def fit(run: OwnRun, **changed: np.ndarray) -> Result:
    """The check of the third site's data, of which some arrays are changed."""
    data: Mapping[str, np.ndarray] = of_hospital(arrays(), "oslo") | changed
    run.data[LATE] = data
    out = run.root / "preflight"
    arguments = SiloArguments(run.run, LATE, run.uri, run.root / "keys", out, site=run.site(LATE))
    del run.data[LATE]
    found = {check.name: check for check in preflight(Program.PREFLIGHT, Starting(run.run, arguments))}
    assert found["coordinator"].verdict is Verdict.OK, found
    assert not out.exists()
    return found["fit with other sites"]


def test_preflight_reports_what_fits_and_what_does_not_before_the_site_joins(run: OwnRun) -> None:
    fits = fit(run)
    assert (fits.verdict, fits.detail) == (Verdict.OK, "labels and inputs fit the other sites' data")
    narrow = fit(run, image=of_hospital(arrays(), "oslo")["image"][:, :7])
    assert narrow.verdict is Verdict.FAILED
    assert narrow.detail == "silo-02 has image features of width 7, the other sites' data has 12"
    new = fit(run, label_names=np.array(["ct", "mri", "pet", "xray"]))
    assert new.verdict is Verdict.OK and "the label 'pet'" in new.detail
    assert run.stated(LATE) == 0


@pytest.mark.parametrize("refused", [False, True])
def test_preflight_compares_the_data_with_what_the_site_has_stated_in_the_run(
    run: OwnRun, refused: bool, tmp_path: Path
) -> None:
    berlin, own = of_hospital(arrays(), "berlin"), RunFolder(tmp_path).messages("silo-00")
    own.parent.mkdir(parents=True)
    lines = run.folder.messages("silo-00").read_text().splitlines()
    if refused:  # after that, other data were stated, and the coordinator refused them
        (line,) = (line for line in lines if '"kind":"statement"' in line)
        record = json.loads(line)
        lines.append(json.dumps(record | {"digests": record["digests"][::-1]}))
        lines.append(json.dumps(record | {"kind": "error", "action": "received"}))
    own.write_text("\n".join(lines) + "\n")
    for data, committed, verdict, words in (
        (berlin, False, Verdict.OK, "the same as what silo-00 stated in this run at "),
        (berlin | {"text": berlin["text"] + 1}, False, Verdict.DIFFERS, "other data .* nothing is agreed yet"),
        (berlin | {"text": berlin["text"] + 1}, True, Verdict.FAILED, "other data .*refuses other data than agreed"),
    ):
        run.data["silo-00"] = data
        arguments = SiloArguments(run.run, "silo-00", "", run.root, tmp_path, site=run.site("silo-00"))
        starting = Starting(run.run, arguments)
        starting.status = status_of(ask_status(run.uri, *(f(run.root / "keys") for f in (silo_key, load_accepted))))
        assert starting.status.coordinator is not None
        known = starting.status.coordinator.model_copy(update={"committed": committed})
        starting.status = starting.status.model_copy(update={"coordinator": known})
        (check,) = (each for each in CHECKS if each.name == "data")
        (stated,) = (each for each in CHECKS if each.name == "data as stated before")
        check.test(starting)
        ((found, detail),) = stated.test(starting) or ()
        assert found is verdict and re.match(words, detail), (found, detail)
    del run.data["silo-00"]


def test_only_silos_and_the_evaluator_learn_the_labels(run: OwnRun) -> None:
    keys = run.root / "keys"
    for name, learns in ((LATE, True), ("operator", False)):
        facts = status_of(ask_status(run.uri, load_identity(keys, name), load_accepted(keys))).coordinator
        assert facts is not None and facts.versions["fedmq"] == __version__ and not facts.committed
        assert (facts.format is not None) == learns
