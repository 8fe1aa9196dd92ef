"""Reports of runs: what they show, and that nothing in a run's files becomes part of the page's code."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from plotly.offline import get_plotlyjs

import protocols  # noqa: F401 - registers the objectives
from coordinator.updates import merge_line
from fedmq.api.results import write_report
from fedmq.audit.log_checks import audit_run
from fedmq.config.privacy import Privacy
from fedmq.config.resolve import load
from fedmq.encoders.image_sets import ImageFiles
from fedmq.errors import InputError
from fedmq.retrieval import report_data
from fedmq.runs.report import figures, logs, run_report
from fedmq.runs.report.html import Figure
from fedmq.runs.report.logs import LogFacts, add_records, timeline
from fedmq.runs.results import read_summary
from fedmq.runs.run_records import EvaluationLine, MergeLine, OwnHeldOut, RunSummary
from fedmq.storage.run_folder import RunFolder
from fedmq.text import tensor_text
from fedmq.wire.log_records import record_of
from tests import in_process_run
from tests.run_summaries import summary
from tests.test_runs_html_page import drawn, titles
from tests.threaded_run import resolved, run

pytestmark = pytest.mark.slow

COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (20, 40, 200)}


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run over 24 coloured images with labels, and faults."""
    root = tmp_path_factory.mktemp("photos")
    lines = []
    for index in range(24):
        colour = list(COLOURS)[index % 3]
        Image.new("RGB", (40, 40 + index), COLOURS[colour]).save(root / f"{index:02}.png")
        facts = {"image": f"{index:02}.png", "captions": [f"a {colour} <b>wall</b> {index}"], "labels": [colour]}
        lines.append(json.dumps({**facts, "split": "test" if index % 4 == 3 else "train"}))
    (root / "items.jsonl").write_text("\n".join(lines))
    scenario = {
        "name": "walls",
        "rounds": 3,
        "protocol": "fedavg",
        "data": {"name": "manifest", "path": str(root / "items.jsonl")},
        "silos": {"count": 2},
        "partition": {"kind": "iid"},
        "backbone": {"name": "lite", "bottleneck": 8},
        "faults": [{"kind": "drop", "silos": ["silo-01"], "rounds": [1]}],
    }
    (root / "walls.yaml").write_text(yaml.safe_dump(scenario))
    run(resolved(root / "walls.yaml"), root / "run")
    return RunFolder(root / "run")


@pytest.mark.slow
def test_a_report_has_examples_with_images_holdings_a_timeline_and_the_space(photo_run: RunFolder) -> None:
    assert write_report(photo_run, None) is None
    page = photo_run.report.read_text(encoding="utf-8")
    found = titles(page)
    for title in (
        "Retrieval on the held-out split",
        "Training loss",
        "Who holds what",
        "Retrieval for each silo",
        "R@1 of the silos",
        "Timeline of the silos",
        "The shared space",
        "Traffic [MB]",
    ):
        assert title in found
    figures = dict(zip(found, drawn(page), strict=True))
    assert all(len(figure.data) > 0 for figure in figures.values())
    assert figures["Who holds what"].data[0].x == ("blue", "green", "red")
    assert sum(map(sum, figures["Who holds what"].data[0].z)) == 18
    names = {trace.name for trace in figures["Timeline of the silos"].data}
    assert {"failed", "scripted fault"} <= names
    assert 6 <= len(re.findall(r'<div class="query">', page)) <= 12
    assert page.count('src="data:image/jpeg;base64,') > 12
    assert page.count('class="hit right"') >= 6
    assert "&lt;b&gt;wall&lt;/b&gt;" in page
    assert "<b>wall</b>" not in page
    assert re.search(r"<h1>fedavg(:| improved| worsened) .*R@1", page)
    assert len(page) - len(get_plotlyjs()) < 2_000_000


def test_an_example_names_the_rank_of_the_right_item_among_the_held_out_ones(photo_run: RunFolder) -> None:
    write_report(photo_run, None)
    data = json.loads((photo_run.root / "report_data.json").read_text())
    assert data["items"] == 6
    for example in data["examples"]:
        assert 1 <= example["rank"] <= 6
        right = [place for place, hit in enumerate(example["hits"], 1) if hit["right"]]
        assert right == ([example["rank"]] if example["rank"] <= 5 else [])
        scores = [hit["score"] for hit in example["hits"]]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) == 5
    for way in ("t2i", "i2t"):
        some = [example for example in data["examples"] if example["way"] == way]
        best = [example["rank"] for example in some if example["best"]]
        worst = [example["rank"] for example in some if not example["best"]]
        assert max(best) <= min(worst)


def test_images_that_are_no_small_jpegs_and_points_without_pairs_are_refused_and_data_of_another_model_left_out(
    photo_run: RunFolder, tmp_path: Path
) -> None:
    write_report(photo_run, None)
    folder = _copy(photo_run, tmp_path)
    path = folder.root / "report_data.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "model_digest": "0" * 64}))
    run_report.write(folder, {})
    assert "What is retrieved" not in folder.report.read_text()
    after = data["after"]
    path.write_text(json.dumps({**data, "after": {**after, "text": after["text"][1:]}}))
    with pytest.raises(InputError, match=r"report_data\.json"):
        run_report.write(folder, {})
    for image in ("javascript:alert(1)", "data:image/svg+xml;base64,AAAA", "x" * 50_000):
        data["examples"][0]["query"]["image"] = image
        path.write_text(json.dumps(data))
        with pytest.raises(InputError, match=r"report_data\.json"):
            run_report.write(folder, {})


def test_a_report_without_the_data_says_why_and_is_written(photo_run: RunFolder, tmp_path: Path) -> None:
    folder = _copy(photo_run, tmp_path)
    (folder.root / "report_data.json").unlink(missing_ok=True)
    text = folder.scenario.read_text()
    folder.scenario.write_text(text.replace("items.jsonl", "elsewhere.jsonl"))
    assert "elsewhere.jsonl" in str(write_report(folder, None))
    assert "Retrieval on the held-out split" in folder.report.read_text()


def test_a_damaged_line_of_a_log_is_refused_or_left_out_and_an_incomplete_last_one_left_out(
    photo_run: RunFolder, tmp_path: Path
) -> None:
    folder = _copy(photo_run, tmp_path)
    log = folder.messages("coordinator")
    first, second, *others = log.read_bytes().splitlines(keepends=True)
    known = logs.read_logs(folder)
    log.write_bytes(b"".join([first, b"{}\n", second, b"[]\n", *others]))
    with pytest.raises(InputError, match=r"coordinator\.jsonl: line 2: found 'not a record'.*fedmq audit"):
        write_report(folder, None, damaged=False)
    assert write_report(folder, None) is None
    assert logs.read_logs(folder) == known
    log.write_bytes(b"".join([first, second, *others, first[:40]]))
    assert logs.read_logs(folder, damaged=False) == known


def test_an_inline_run_has_a_timeline_from_its_merges_and_tells_what_its_data_allow(tiny: Path, tmp_path: Path) -> None:
    with np.load(yaml.safe_load(tiny.read_text())["data"]["path"]) as stored:
        arrays = dict(stored)
    arrays["keys"] = np.array([f"{row:06d}" for row in range(len(arrays["image"]))])
    first, second = np.flatnonzero(arrays["split"] == "test")[:2]
    arrays["image"][second] = arrays["image"][first]
    np.savez(tmp_path / "twice.npz", **arrays)
    in_process_run.run(resolved(tiny, f"data.path={tmp_path / 'twice.npz'}"), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert write_report(folder, None) is None
    page = folder.report.read_text()
    busy = dict(zip(titles(page), drawn(page), strict=True))["Timeline of the silos"].data[0]
    assert max(map(max, busy.z)) == 1
    assert "there is nothing to audit" in page and "silos that sent it" not in page
    assert "from the files: 100 train" in page and "from image to text, R@1 can reach at most 0.97" in page


def test_the_report_and_the_audit_agree_on_what_left_the_silos(photo_run: RunFolder) -> None:
    run_report.write(photo_run, {})
    section = photo_run.report.read_text().partition('<h2 id="privacy">')[2].partition("<h2")[0]
    found = re.findall("<tr>" + r"<td[^>]*>(.*?)</td>" * 4 + "</tr>", section)
    audit = audit_run(photo_run.root)
    silos = [name for name in audit.payloads.number if name.startswith("silo-")]
    kinds = sorted({kind for name in silos for kind in audit.payloads.number[name]})
    assert {"data_statement", "delta", "loss"} <= set(kinds)
    expected = []
    for kind in kinds:
        numbers = [audit.payloads.number[name][kind] for name in silos if audit.payloads.number[name][kind]]
        size = sum(audit.payloads.bytes[name][kind] for name in silos)
        row = (kind.replace("_", " "), str(len(numbers)), f"{sum(numbers):,}")
        expected.append((*row, tensor_text(size)))
    assert found == expected
    assert [(silos, size) for kind, silos, _, size in found if kind == "loss"] == [("2", "numbers only")]
    assert ("data statement", "2", "2", "240 B") in found


def test_a_headline_claims_a_change_only_beyond_what_chance_explains() -> None:
    def of(before: float, after: float) -> str:
        figures = {"items": 18, "metrics": {}, "per_silo": {"silo-00": {"items": 6, "mean_r1": after}},
                   "per_silo_mean": {}, "fairness": {}}  # fmt: skip
        heldout = OwnHeldOut.model_validate(figures)
        found = summary(metrics={"mean_r1": after}, own_heldout=heldout)
        return run_report.headline(found, {"mean_r1": before})

    assert "fedavg: R@1 0.708 before and after 2 rounds, on 18 held-out pairs" in of(0.708, 0.708)
    # One of 36 queries; the variance of a proportion of 0.722 among them is 0.722 * 0.278 / 36.
    assert "R@1 0.708 before and 0.736 after 2 rounds, no more than the standard error of 0.075" in of(0.708, 0.736)
    assert "fedavg improved retrieval from R@1 0.500 to 0.708 in 2 rounds" in of(0.5, 0.708)
    assert "fedavg worsened retrieval from R@1 0.708 to 0.500 in 2 rounds" in of(0.708, 0.5)


def test_a_training_loss_of_a_silo_that_had_nothing_to_train_on_is_not_drawn() -> None:
    found = ({"silo-00": 2.0, "silo-01": 0.0}, {"silo-00": 1.0, "silo-01": 0.5})
    replies: list[list[Any]] = [
        [SimpleNamespace(silo=SimpleNamespace(name=silo), loss=loss, staleness=0) for silo, loss in losses.items()]
        for losses in found
    ]
    lines = [merge_line(version, 0.0, each, {}) for version, each in enumerate(replies, 1)]
    assert [line.loss for line in lines] == [2.0, 0.75], "one value for report, side by side, trackers and status"
    (figure,) = figures.losses(lines, {"silo-00": ("image",), "silo-01": ("image", "text")}, "silo-01")
    drawn_ = {str(trace["name"]): (trace["x"], trace["y"]) for trace in figure.traces}
    assert drawn_["images only (1), median"] == ([1, 2], [2.0, 1.0])
    assert drawn_["images and captions (1), median"] == drawn_["silo-01"] == ([2], [0.5])
    assert "nothing to train on" in figure.note


def test_a_long_curve_is_smoothed_with_its_values_behind_and_a_short_one_is_not() -> None:
    assert figures.smooth([1.0, 5.0, 3.0]) == [1.0, 5.0, 3.0]
    noisy = [float(value % 2) for value in range(40)]
    figure = Figure("", "", "")
    figures.draw_noisy(figure, range(40), noisy, "loss", "#000000")
    assert figure.traces[0]["y"] == noisy
    smoothed = figure.traces[1]["y"]
    assert isinstance(smoothed, list) and len(smoothed) == 40 and max(smoothed[2:-2]) <= 0.7
    assert (smoothed[0], smoothed[-1]) == (noisy[0], noisy[-1]), "a curve ends at the value of the tables"
    course = [(at, {"mean_r1": each}) for at, each in enumerate(noisy)]
    (made,) = figures.retrieval("R", course, (), {"rounds": {}}, "", "")
    assert [trace["y"] for trace in made.traces] == [noisy, smoothed]


def test_a_cell_of_the_timeline_is_a_merge_and_as_dark_as_the_silo_was_busy() -> None:
    facts, silos = LogFacts(), ["fast", "slow"]
    merges = [
        MergeLine(kind="merge", version=at, now=10.0 * at, replies=silos, staleness=[0, 0]) for at in range(1, 41)
    ]
    for at in range(40):
        for silo, share in (("fast", 0.2), ("slow", 1.0)):
            facts.tasks[silo, at] = logs.TaskSpan(silo, at, 10.0 * at, 10.0 * (at + share), "reply arrived")
    figure = timeline(facts, merges, silos, "")
    assert figure is not None and "Each cell is 1 merge. Full colour: the silo had a task" in figure.note
    fast, slow = figure.traces[0]["z"]  # type: ignore[misc]
    assert fast == pytest.approx([0.2] * 40) and slow == pytest.approx([1.0] * 40)
    inline = timeline(LogFacts(), merges, silos, "")
    assert inline is not None and "until its reply was merged" in inline.note and "sent" not in inline.note


@pytest.mark.parametrize(("items", "low", "high"), [(5, 0.11, 0.60), (11, 0.15, 0.50), (320, 0.27, 0.34)])
def test_the_interval_of_few_items_is_wide(items: int, low: float, high: float) -> None:
    assert figures.interval(0.3, items) == pytest.approx((low, high), abs=0.012)


def test_the_first_screen_says_the_peak_who_is_left_behind_and_what_failed(tiny: Path) -> None:
    def line(version: int, shared: float, silo: float) -> EvaluationLine:
        per_silo = {"silo-00": {"mean_r1": silo}}
        return EvaluationLine(kind="evaluation", version=version, metrics={"mean_r1": shared}, per_silo=per_silo)

    silo = {"modalities": ["image", "text"], "samples": 9, "participations": 2, "tasks": 2, "heldout": 11}
    more = {
        "metrics": {"mean_r1": 0.484},
        "per_silo": {"silo-00": {**silo, "mean_r1": 0.25}},
        "evaluated": {"split": "test", "images": 323},
        "tasks": {"merged": 4, "failed": 1, "discarded": 2},
        "messages": {"refused": 3},
    }
    found = RunSummary.model_validate({**summary().plain(), **more})
    evaluations = [line(0, 0.48, 0.35), line(1, 0.548, 0.4), line(2, 0.484, 0.25)]
    worked, behind, sent, failed = run_report.answers(found, evaluations, load(tiny), LogFacts())
    assert worked[1] == "R@1 0.480 → 0.484"
    assert worked[2][0] == "Peak 0.548 in round 1; the end is 0.064 below it."
    assert "0.446 to 0.523 after" in worked[2][1]
    assert behind[1] == "1 of 1 silo ended below the start"
    assert behind[2] == [
        "silo-00: 0.350 → 0.250, 11 items, 95 % interval 0.12 to 0.46.",
        "Start above the end's interval: none of them.",
    ]
    assert sent[1].endswith("down") and "clipped" in sent[2][-1]
    assert failed[1] == "3 tasks and 3 messages"
    assert failed[2] == ["4 of 7 tasks merged, 1 failed, 2 discarded.", "3 messages refused."]


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({}, "Updates were neither clipped nor noised: the coordinator saw them as the silos computed them."),
        (
            {"secure_aggregation": True},
            "The coordinator learned weighted sums of the updates, and none of the updates.",
        ),
        (
            {"secure_aggregation": True, "clip_norm": 1, "noise_multiplier": 4},
            "The coordinator learned weighted sums of the updates, and none of the updates. Updates were clipped to "
            "norm 1.0 and their sum was noised (multiplier 4.0). The noise comes from the scenario's seed, which "
            "anyone may know. fedmq audit computes epsilon.",
        ),
        (
            {"statistics": {"loss": {"clip_norm": 5, "noise_multiplier": 4}}},
            "Updates were neither clipped nor noised: the coordinator saw them as the silos computed them. Also "
            "clipped and noised: loss (multiplier 4).",
        ),
    ],
)
def test_the_report_says_what_protected_the_updates(privacy: dict[str, Any], words: str) -> None:
    assert Privacy.model_validate(privacy).in_words == words


def test_traffic_is_stacked_by_kind_in_both_directions(photo_run: RunFolder) -> None:
    found = read_summary(photo_run)
    figure = figures.traffic(found)
    assert figure is not None
    bars = {str(trace["name"]): trace["x"] for trace in figure.traces}
    assert {"delta", "loss", "modality prototypes", "model"} <= bars.keys()
    assert bars["delta"] == [found.bytes.up["delta"] / 1e6, 0.0]
    assert bars["model"] == [0.0, found.bytes.down["model"] / 1e6]


def test_a_small_perfect_run_has_its_size_no_certain_recalls_and_no_worst_cases(
    photo_run: RunFolder, tmp_path: Path
) -> None:
    write_report(photo_run, None)
    folder = _copy(photo_run, tmp_path)
    path = folder.root / "report_data.json"
    data = json.loads(path.read_text())
    for example in data["examples"]:
        example["rank"] = 1
    path.write_text(json.dumps(data))
    run_report.write(folder, {})
    page = folder.report.read_text()
    assert "6 test images, 6 captions</h1>" in page
    assert '<p class="remark">R@10 is not shown: with 6 items to retrieve from, any model reaches 1</p>' in page
    assert re.search(r"<td[^>]*>mean_r10</td><td[^>]*>-</td><td[^>]*>-</td>", page)
    curves = dict(zip(titles(page), drawn(page), strict=True))["Retrieval on the held-out split"]
    assert [trace.name for trace in curves.data] == ["R@1", "R@5", "mAP"]
    assert "No text to image query went wrong" in page and "Worst cases" in page
    assert len(re.findall(r'<div class="query">', page)) == 6
    assert "virtual time [s]" in page and "s of virtual time, simulated" in page


def test_a_thumbnail_has_the_whole_image(tmp_path: Path) -> None:
    Image.new("RGB", (400, 100), COLOURS["red"]).save(tmp_path / "wide.png")
    found = report_data.thumbnail(ImageFiles((tmp_path / "wide.png",)), 0)
    assert Image.open(io.BytesIO(base64.b64decode(found.partition(",")[2]))).size == (112, 28)


def test_the_log_gives_every_task_its_outcome(photo_run: RunFolder) -> None:
    facts = logs.read_logs(photo_run).course
    outcomes: dict[str, int] = {}
    for task in facts.tasks.values():
        outcomes[task.outcome] = outcomes.get(task.outcome, 0) + 1
        assert task.end is None or task.end >= task.start
    assert outcomes["reply arrived"] == 5
    assert sum(outcomes.values()) == 6
    summary = read_summary(photo_run)
    assert facts.up["silo-00"]["delta"] + facts.up["silo-01"]["delta"] == summary.bytes.up["delta"]
    silos = ["silo-00", "silo-01"]
    assert timeline(facts, [], silos, "") is not None
    # A silo that was lost for a while is sent its task again, and its second reply is discarded.
    lines = [json.loads(line) for line in photo_run.messages("coordinator").read_text().splitlines()]
    sent = next(each for each in lines if each.get("kind") == "task")
    again = {"event": "reply_discarded", "silo": sent["receiver"], "sequence": sent["sequence"], "reason": "duplicate"}
    note = {key: sent[key] for key in ("hash", "n", "previous", "process", "run", "wall")} | {"action": "note", **again}
    task = facts.tasks[sent["receiver"], sent["sequence"]]
    before = dataclasses.replace(task)
    written = (sent | {"sent_at": task.start + 1}, note)
    added = [json.dumps(each, sort_keys=True, separators=(",", ":")).encode() for each in written]
    assert all(record_of(line + b"\n") is not None for line in added)
    add_records(facts, added)
    assert facts.tasks[sent["receiver"], sent["sequence"]] == before


def test_several_runs_stand_side_by_side(photo_run: RunFolder, tmp_path: Path) -> None:
    other = _copy(photo_run, tmp_path)
    (tmp_path / "page.html").write_text(run_report.side_by_side([photo_run, other]))
    page = (tmp_path / "page.html").read_text()
    assert "2 runs side by side" in page
    assert titles(page)[0] == "recall@1, mean"
    assert [trace.name for trace in drawn(page)[0].data] == ["run", "copy"]
    assert "cannot be compared" not in page and "<h2>Settings that differ</h2>\n<p>None.</p>" in page
    other.scenario.write_text(other.scenario.read_text().replace("rounds: 3", "rounds: 4"))
    summary = json.loads(other.summary.read_text())
    other.summary.write_text(json.dumps({**summary, "data_digest": "0" * 64}))
    (tmp_path / "page.html").write_text(run_report.side_by_side([photo_run, other]))
    page = (tmp_path / "page.html").read_text()
    assert "cannot be compared" in page
    differing = page.partition("Settings that differ")[2].partition("<h2>")[0]
    assert re.findall(r"<td[^>]*>(.*?)</td>", differing)[:3] == ["rounds", "3", "4"]


def test_runs_of_a_comparison_are_named_by_what_differs(photo_run: RunFolder, tmp_path: Path) -> None:
    names = ("smoke-fedavg-seed0-2d7eaab22bca", "smoke-rcsr-seed0-5b3bea0f8032")
    page = run_report.side_by_side([_copy(photo_run, tmp_path, name) for name in names])
    assert [trace.name for trace in drawn(page)[0].data] == ["fedavg-seed0", "rcsr-seed0"]


def _copy(folder: RunFolder, tmp_path: Path, name: str = "copy") -> RunFolder:
    return RunFolder(Path(shutil.copytree(folder.root, tmp_path / name)))
