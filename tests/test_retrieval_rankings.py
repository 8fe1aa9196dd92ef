"""Rankings as TREC files: ``fedmq export --trec``."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from fedmq.errors import InputError
from fedmq.retrieval import rankings
from tests import threaded_run
from tests.command_line import fedmq


def fields(file: Path) -> list[list[str]]:
    return [line.split(" ") for line in file.read_text().splitlines()]


def by_definition(folder: Path, way: str) -> dict[str, float]:
    """Recall and mAP@R of the files alone."""
    relevant: dict[str, set[str]] = defaultdict(set)
    found: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for query, _, item, relevance in fields(folder / f"{way}.qrels"):
        assert relevance == "1"
        relevant[query].add(item)
    for query, q0, item, rank, score, _ in fields(folder / f"{way}.run"):
        assert (q0, int(rank)) == ("Q0", len(found[query]) + 1)
        assert not found[query] or float(score) <= found[query][-1][1]
        found[query].append((item, float(score)))
    assert relevant.keys() == found.keys()
    values: dict[str, list[float]] = defaultdict(list)
    for query, own in relevant.items():
        hits = [item in own for item, _ in found[query]]
        values["R@1"].append(hits[0])
        values["R@10"].append(any(hits[:10]))
        places = [place for place, hit in enumerate(hits[: len(own)], start=1) if hit]
        values["mAP@R"].append(sum((number + 1) / place for number, place in enumerate(places)) / len(own))
    return {name: float(np.mean(each)) for name, each in values.items()}


@pytest.mark.parametrize("settings", [(), ("objective={base: dcmh, bits: 12, hidden: 16}",)])
def test_the_files_measure_what_the_run_measured(
    settings: tuple[str, ...],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    threaded_run.run(threaded_run.resolved(tiny, "protocol=fedavg", *settings), tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    capsys.readouterr()
    assert fedmq(monkeypatch, "export", tmp_path / "run", "--trec", tmp_path / "trec", "--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    for way in ("i2t", "t2i"):
        found = by_definition(tmp_path / "trec", way)
        assert found["R@1"] == pytest.approx(metrics[f"{way}_r1"], abs=1e-12)
        assert found["R@10"] == pytest.approx(metrics[f"{way}_r10"], abs=1e-12)
        assert {name: scores[way][name] for name in found} == pytest.approx(found)
    # An item found first and judged relevant by a file turns a miss into a hit.
    own = {(line[0], line[2]) for line in fields(tmp_path / "trec" / "t2i.qrels")}
    firsts = [(line[0], line[2]) for line in fields(tmp_path / "trec" / "t2i.run") if line[3] == "1"]
    query, item = next(pair for pair in firsts if pair not in own)
    (tmp_path / "more.qrels").write_text(f"{query} 0 {item} 1\nother 0 {item} 1\n{query} 0 x 0\n")
    more = ("--positives", tmp_path / "more.qrels")
    assert fedmq(monkeypatch, "export", tmp_path / "run", "--trec", tmp_path / "trec", "--json", *more) == 0
    after = json.loads(capsys.readouterr().out)["scores"]
    assert after["t2i"]["R@1"] > scores["t2i"]["R@1"]
    assert after["i2t"] == scores["i2t"]
    assert {name: after["t2i"][name] for name in found} == pytest.approx(by_definition(tmp_path / "trec", "t2i"))


def test_names_have_no_blanks_and_damaged_judgements_are_refused(tmp_path: Path) -> None:
    assert rankings._named(["a b%", "ü", "x/y#0"]) == ["a%20b%25", "%C3%BC", "x/y#0"]
    for line in ("a 0 b", "a 0 b ²", "a 0 b --1"):
        (tmp_path / "bad.qrels").write_text(f"a 0 b 1\n{line}\n")
        with pytest.raises(InputError, match="line 2"):
            rankings.with_positives({}, tmp_path / "bad.qrels")


def test_a_query_with_more_relevant_items_than_its_ranking_has_places_is_refused() -> None:
    relevant = {"q": frozenset({"a", "b", "c"})}
    short = rankings.Rankings(["q"], ["a", "b", "c"], np.array([[0, 1]]), np.zeros((1, 2), np.float32), relevant)
    with pytest.raises(InputError, match="3 or more"):
        rankings.scores_of(short)
