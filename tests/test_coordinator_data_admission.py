"""Which sites with data of their own are admitted, and which one is refused where two do not fit together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.data_admission import Admitted, Agree, OwnDataAdmission, SimulatedAdmission, Waiting
from fedmq.errors import RemoteWireError
from fedmq.runs.data_records import AgreementRecord
from fedmq.wire.messages import EVALUATOR, Header, Kind, Message
from fedmq.wire.payloads import DataFormat, DataStatement

SILOS = ("silo-00", "silo-01", "silo-02", "silo-03")
FORMAT = DataFormat(
    label_names=("ct", "mri"),
    vocabulary=(),
    image_shape=np.array([12], np.int64),
    text_shape=np.array([12], np.int64),
    image_dtype="float32",
    text_dtype="float32",
    image_encoder="none",
    text_encoder="none",
    mean=np.zeros(0, np.float32),
    std=np.zeros(0, np.float32),
)
NARROW = replace(FORMAT, image_shape=np.array([7], np.int64))


def message(name: str, kind: Kind, *payloads: Any) -> Message:
    header = Header(run="run", kind=kind, sender=name, receiver="coordinator", sequence=0, sent_at=0.0)
    return Message(header, payloads)


def stated(name: str, held: DataFormat = FORMAT) -> Message:
    counts = np.zeros((5, 3), np.int64)
    counts[:, 0] = 10
    return message(name, Kind.STATEMENT, DataStatement(f"{hash(name) % 16:x}" * 64, 3, counts), held)


def admission(silos: int = 3, minimum: int | None = None) -> OwnDataAdmission:
    return OwnDataAdmission(SILOS[:silos], "run", evaluator=True, minimum=minimum)


def decide(found: OwnDataAdmission, name: str, held: DataFormat = FORMAT) -> Any:
    return found.decide(name, stated(name, held))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"mask": 3}, "silo-00 states pairs (train 0+0+9, test 0+0+2); the partition gives it captions (train 0+0+9,"),
        ({"mask": 0}, "silo-00 states no modality (train 0+0+9,"),
        ({"counts": np.arange(15).reshape(5, 3)}, "silo-00 states captions (train 0+1+2, val 3+4+5, test 6+7+8, "),
        ({"data": "b" * 64}, "silo-00 has other data (digest bbbbbbbbbbbb) than the coordinator (aaaaaaaaaaaa);"),
    ],
)
def test_a_process_that_states_other_data_than_the_partition_gives_it_is_refused(
    change: Mapping[str, Any], line: str
) -> None:
    """The coordinator used to admit it, and every record of the run then showed its numbers."""
    counts = np.zeros((5, 3), np.int64)
    counts[[0, 2], 2] = 9, 2
    true = DataStatement("a" * 64, 2, counts)
    found = SimulatedAdmission({"silo-00": true}, "run")
    with pytest.raises(RemoteWireError, match=re.escape(line)) as refused:
        found.decide("silo-00", message("silo-00", Kind.STATEMENT, replace(true, **change)))
    assert refused.value.reason == "data"
    assert found.stated == {}
    assert found.decide("silo-00", message("silo-00", Kind.STATEMENT, true)) == Admitted()


def test_a_wrong_site_that_states_its_data_first_is_refused_once_two_others_agree() -> None:
    found = admission()
    assert decide(found, "silo-02", NARROW) == Waiting()
    assert decide(found, "silo-00") == Waiting()
    assert found.conflicts.open == "silo-02 has image features of width 7, silo-00 has 12"
    refused = decide(found, "silo-01").refused
    assert set(refused) == {"silo-02"}
    assert (
        "silo-02 has image features of width 7, silo-00 has 12; silo-02 fits with 0 of the other" in refused["silo-02"]
    )
    assert "Correct the data of silo-02 and start it again" in refused["silo-02"]
    assert (found.missing, found.agreeable) == (("silo-02",), False)
    assert decide(found, "silo-02") == Waiting()
    assert found.agreeable


def test_if_no_other_silo_shows_which_of_two_sites_is_wrong_the_later_one_is_refused_with_advice() -> None:
    found = admission(2)
    decide(found, "silo-01", NARROW)
    line = decide(found, "silo-00").refused["silo-00"]
    assert "silo-00 has image features of width 12, silo-01 has 7" in line
    assert "if it is silo-01, which stated its data first, stop silo-01" in line
    # The operator finds that silo-01 was wrong: it states other data, after which silo-00 fits.
    assert decide(found, "silo-01") == decide(found, "silo-00") == Waiting()
    assert found.agreeable


def test_two_against_two_wait_until_all_have_stated_and_sites_of_one_modality_do_not_decide() -> None:
    found = admission(4)
    captions = replace(FORMAT, image_shape=np.zeros(0, np.int64), image_dtype="none")
    decide(found, "silo-00", NARROW)
    decide(found, "silo-01")
    alone = message("silo-02", Kind.STATEMENT, replace(stated("silo-02").payloads[0], mask=2), captions)  # type: ignore[type-var]
    assert found.decide("silo-02", alone) == Waiting()
    assert found.conflicts.open
    assert set(decide(found, "silo-03").refused) == {"silo-00"}


def test_a_minimum_agrees_and_a_late_silo_fits_or_is_refused_by_name() -> None:
    found = admission(4, minimum=2)
    decide(found, "silo-00")
    assert not found.agreeable
    decide(found, "silo-01", replace(FORMAT, label_names=("us", "mri")))
    assert found.agreeable
    found.agree()
    first = found.agreement
    assert first[0].label_names == ("ct", "mri", "us")
    with pytest.raises(RemoteWireError, match=r"silo-02 has the label 'pet', which the agreement of silo-00, silo-01"):
        decide(found, "silo-02", replace(FORMAT, label_names=("ct", "pet")))
    with pytest.raises(RemoteWireError, match=r"width 7, the agreement of silo-00, silo-01 has 12; correct the data"):
        decide(found, "silo-02", NARROW)
    assert decide(found, "silo-02") == Waiting()
    assert (list(found.late), first[1].silos) == (["silo-02"], ("silo-00", "silo-01"))
    before = found.run_data(Path())
    assert [silo.image or silo.text for silo in before.silos] == [True, True, False, False]
    found.include("silo-02")
    after = found.run_data(Path())
    assert (after.digest, after.content == before.content) == (before.digest, False)
    assert found.agreement[1].silos == SILOS[:3]
    # silo-00 confirms what it was sent before silo-02 was included.
    assert found.decide("silo-00", message("silo-00", Kind.AGREEMENT, *first)) == Admitted()
    assert isinstance(decide(found, "silo-02"), Agree)


def test_a_resumed_coordinator_knows_the_late_silos_and_refuses_them_with_other_data() -> None:
    found = admission(4, minimum=2)
    decide(found, "silo-00")
    decide(found, "silo-01")
    found.agree()
    decide(found, "silo-03")
    found.include("silo-03")
    known = AgreementRecord.model_validate(found.record().plain())
    again = OwnDataAdmission(SILOS, "run", evaluator=True, known=known, minimum=2)
    before, after = found.run_data(Path()), again.run_data(Path())
    assert (before.digest, before.content, before.silos) == (after.digest, after.content, after.silos)
    with pytest.raises(RemoteWireError, match="silo-03 has other data"):
        decide(again, "silo-03", replace(FORMAT, label_names=("ct",)))
    assert decide(again, "silo-02") == Waiting()


def test_an_evaluator_with_a_label_that_no_silo_has_is_refused() -> None:
    found = admission(2)
    decide(found, "silo-00")
    decide(found, "silo-01")
    found.agree()
    with pytest.raises(RemoteWireError, match="evaluator has the label 'pet'"):
        decide(found, EVALUATOR, replace(FORMAT, label_names=("pet",)))
    assert isinstance(decide(found, EVALUATOR), Agree)
