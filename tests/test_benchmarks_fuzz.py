"""Damaged files and frames: every reader reads or refuses them; the driver tells when one does not."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from benchmarks import fuzz as driver
from benchmarks.fuzz import CAMPAIGNS, Campaign, fuzz
from fedmq.errors import InputError
from tests.damaged_files import Folder, Kind, Special, folders, read_damaged, restructured, valid, write
from tests.file_kinds import KINDS

pytestmark = pytest.mark.slow

#: Kinds of files in one process; those that need the largest libraries are beside each other.
_TOGETHER = 12
FRAMES = [name for name in CAMPAIGNS if name.endswith(" frame")]


def together(campaigns: Mapping[str, Campaign]) -> Campaign:
    """An example of each: in one process, the libraries that read them are imported once."""

    def check(examples: tuple[Any, ...], place: Path) -> Counter[str]:
        found = Counter[str]()
        for (name, campaign), example in zip(campaigns.items(), examples, strict=True):
            try:
                found += campaign.check(example, place / name.replace(" ", "_"))
            except BaseException as error:
                error.add_note(name)
                raise
        return found

    def begin(place: Path) -> None:
        for name, campaign in campaigns.items():
            (place / name.replace(" ", "_")).mkdir()
            campaign.begin(place / name.replace(" ", "_"))

    return Campaign(st.tuples(*(campaign.examples for campaign in campaigns.values())), check, begin)


@pytest.mark.longest
@pytest.mark.parametrize("first", range(0, len(KINDS), _TOGETHER))
def test_damaged_files_are_read_or_refused(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = list(KINDS)[first : first + _TOGETHER]
    monkeypatch.setattr(driver, "SLOWEST_S", driver.SLOWEST_S * 2)  # of all kinds in turn
    tally = fuzz(together({kind: CAMPAIGNS[kind] for kind in kinds}), 4, seed=1)
    assert not tally.failure, tally.failure
    assert set(tally.outcomes) <= {"read", "refused"} and tally.outcomes.total() == 4 * len(kinds)


def test_damaged_run_folders_are_read_or_refused() -> None:
    tally = fuzz(CAMPAIGNS["run folder"], 20, seed=1)
    assert not tally.failure, tally.failure


def test_damaged_frames_are_accepted_or_refused() -> None:
    for kind in FRAMES:
        tally = fuzz(CAMPAIGNS[kind], 50, seed=1)
        assert not tally.failure, f"{kind}: {tally.failure}"
        assert tally.outcomes["malformed"], kind  # some damage is harmless: the first check does not refuse everything


def test_a_roster_stays_within_its_rate_limits_for_any_frames() -> None:
    tally = fuzz(CAMPAIGNS["exchange"], 4, seed=1)
    assert not tally.failure, tally.failure
    assert tally.outcomes["message accepted"] and tally.outcomes["message too_often"]


def test_the_same_seed_makes_the_same_examples() -> None:
    shown = Campaign(folders(KINDS["heads"]), lambda content, _: Counter([str(content["heads.json"])]))
    one, same, other = (fuzz(shown, 10, seed).outcomes for seed in (3, 3, 4))
    assert one == same != other


def test_a_folder_with_links_pipes_and_folders_in_place_of_files_is_written(tmp_path: Path) -> None:
    content: Folder = {
        "a/b.txt": b"1",
        "link": Special("link", ".."),
        "pipe": Special("pipe"),
        "folder": Special("folder"),
    }
    write(tmp_path / "made", content)
    assert (tmp_path / "made" / "a" / "b.txt").read_bytes() == b"1"
    assert (tmp_path / "made" / "link").readlink() == Path("..")
    assert (tmp_path / "made" / "pipe").is_fifo() and (tmp_path / "made" / "folder").is_dir()


@pytest.mark.parametrize("kind", ["a.npz", "parquet", "csv"])
def test_damage_of_what_a_format_holds_leaves_a_file_of_that_format(kind: str) -> None:
    files = valid(KINDS[kind])
    name = next(name for name in files if name != "list.csv" and not name.startswith("src"))
    content = files[name]
    assert isinstance(content, bytes)
    changed = [restructured(name, content, random.Random(number)) for number in range(20)]
    assert len(set(changed)) > 10
    assert sum(each[:4] == content[:4] for each in changed) > 10


class SeveralLinesError(InputError):
    def __str__(self) -> str:
        return "two\nlines"


def _fails(what: str) -> None:
    """A reader that fails in a way."""
    match what:
        case "ValueError":
            raise ValueError("not an InputError")
        case "MB more than before":
            np.ones(300_000_000 // 8).sum()
        case "the process died":
            os._exit(7)
        case "a hang":
            while time.process_time() >= 0:
                pass
        case "a refusal of several lines":
            raise SeveralLinesError("place", "found", "allowed")
        case "nothing for":
            os.mkfifo("pipe")
            Path("pipe").read_bytes()


@pytest.mark.parametrize("what", [
    "ValueError", "MB more than before", "the process died", "a hang", "a refusal of several lines", "nothing for",
])  # fmt: skip
def test_crashes_hangs_memory_and_dead_processes_are_failures(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(driver, "GIVEN_UP_S", 0.5)
    monkeypatch.chdir(tmp_path)
    kind = Kind(lambda: {"f": b""}, lambda _: _fails(what))
    campaign = Campaign(st.just({"f": b"9"}), lambda content, place: Counter([read_damaged(kind, content, place)]))
    tally = fuzz(campaign, 1, dead_s=1.0)
    assert what in tally.failure


def test_a_valid_file_that_is_refused_is_a_failure() -> None:
    def refuse(_: Path) -> None:
        raise InputError("f", "a valid file", "nothing")

    tally = fuzz(driver.campaign_of(Kind(lambda: {"f": b"9"}, refuse)), 1)
    assert "InputError" in tally.failure and not tally.outcomes


def test_the_command_prints_the_smallest_failing_example_and_keeps_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_short(folder: Path) -> None:
        if (folder / "f").is_file():
            assert (folder / "f").stat().st_size >= 3, "too short"

    campaign = driver.campaign_of(Kind(lambda: {"f": b"12345"}, refuse_short))
    monkeypatch.setattr(driver, "CAMPAIGNS", {"fake": campaign, "heads": CAMPAIGNS["heads"]})
    for kinds, status in ((["heads"], 0), ([], 1)):
        command = ["fuzz", "--examples", "100", "--keep", str(tmp_path / "kept"), *kinds]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            driver.main()
        assert ended.value.code == status
    assert "too short" in capsys.readouterr().out
    assert (tmp_path / "kept" / "fake" / "f").stat().st_size < 3
