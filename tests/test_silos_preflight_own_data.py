"""``fedmq preflight --site``: whether a site's data fit those of the others, without stating them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from fedmq.federation.preflight import Result, Verdict
from fedmq.packages import __version__
from fedmq.runs.status import status_of
from fedmq.wire.inquiry import ask_status
from fedmq.wire.keys import accept_key, load_accepted, load_identity, new_key
from silos.preflight import preflight
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


def fit(run: OwnRun, **changed: np.ndarray) -> Result:
    """The check of the third site's data, of which some arrays are changed."""
    data: Mapping[str, np.ndarray] = of_hospital(arrays(), "oslo") | changed
    run.data[LATE] = data
    out = run.root / "preflight"
    arguments = SiloArguments(run.run, LATE, run.uri, run.root / "keys", out, site=run.site(LATE))
    del run.data[LATE]
    found = {check.name: check for check in preflight(arguments)}
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


def test_only_silos_and_the_evaluator_learn_the_labels(run: OwnRun) -> None:
    keys = run.root / "keys"
    for name, learns in ((LATE, True), ("operator", False)):
        facts = status_of(ask_status(run.uri, load_identity(keys, name), load_accepted(keys))).coordinator
        assert facts is not None and facts.versions["fedmq"] == __version__ and not facts.settled
        assert (facts.format is not None) == learns
