"""Reports of runs: what they show, and that nothing in a run's files becomes part of the page's code."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from PIL import Image
from plotly.offline import get_plotlyjs

import protocols  # noqa: F401 - registers the objectives
from fedmq.audit.log_checks import audit_run
from fedmq.cli.report import complete_report
from fedmq.encoders.image_sets import ImageFiles
from fedmq.errors import InputError
from fedmq.retrieval import report_data
from fedmq.runs.report import figures, logs, run_report, side_by_side
from fedmq.runs.report.logs import add_records, timeline
from fedmq.runs.results import read_summary
from fedmq.runs.run_records import MergeLine, OwnHeldOut
from fedmq.storage.run_folder import RunFolder
from fedmq.text import size_text
from fedmq.wire.log_records import record_of
from tests import in_process_run
from tests.run_summaries import summary
from tests.test_runs_html_page import drawn, titles
from tests.threaded_run import resolved, run

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
    assert complete_report(photo_run, None) is None
    page = photo_run.report.read_text(encoding="utf-8")
    found = titles(page)
    for title in (
        "Retrieval on the held-out split",
        "Training loss",
        "Who holds what",
        "Retrieval for each silo",
        "Participation",
        "Timeline of the silos",
        "The shared space before training",
        "The shared space after training",
        "Traffic from the silos",
    ):
        assert title in found
    figures = dict(zip(found, drawn(page), strict=True))
    assert all(len(figure.data) > 0 for figure in figures.values())
    assert figures["Who holds what"].data[0].x == ("blue", "green", "red")
    assert sum(map(sum, figures["Who holds what"].data[0].z)) == 18
    names = {trace.name for trace in figures["Timeline of the silos"].data}
    assert {"reply arrived", "scripted fault"} <= names
    assert 6 <= len(re.findall(r'<div class="query">', page)) <= 12
    assert page.count('src="data:image/jpeg;base64,') > 12
    assert page.count('class="hit right"') >= 6
    assert "&lt;b&gt;wall&lt;/b&gt;" in page
    assert "<b>wall</b>" not in page
    assert re.search(r"<h1>fedavg(:| improved| worsened) .*R@1", page)
    assert len(page) - len(get_plotlyjs()) < 2_000_000


def test_an_example_names_the_rank_of_the_right_item_among_the_held_out_ones(photo_run: RunFolder) -> None:
    complete_report(photo_run, None)
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


@pytest.mark.parametrize("image", ["javascript:alert(1)", "data:image/svg+xml;base64,AAAA", "x" * 50_000])
def test_a_image_that_is_not_a_small_jpeg_is_refused(photo_run: RunFolder, tmp_path: Path, image: str) -> None:
    complete_report(photo_run, None)
    folder = _copy(photo_run, tmp_path)
    path = folder.root / "report_data.json"
    data = json.loads(path.read_text())
    data["examples"][0]["query"]["image"] = image
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"report_data\.json"):
        run_report.write(folder, {})


def test_data_of_another_model_are_left_out(photo_run: RunFolder, tmp_path: Path) -> None:
    complete_report(photo_run, None)
    folder = _copy(photo_run, tmp_path)
    path = folder.root / "report_data.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_digest": "0" * 64}))
    run_report.write(folder, {})
    assert "What is retrieved" not in folder.report.read_text()


def test_a_report_without_the_data_says_why_and_is_written(photo_run: RunFolder, tmp_path: Path) -> None:
    folder = _copy(photo_run, tmp_path)
    (folder.root / "report_data.json").unlink(missing_ok=True)
    text = folder.scenario.read_text()
    folder.scenario.write_text(text.replace("items.jsonl", "elsewhere.jsonl"))
    assert "elsewhere.jsonl" in str(complete_report(folder, None))
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
        complete_report(folder, None, damaged=False)
    assert complete_report(folder, None) is None
    assert logs.read_logs(folder) == known
    log.write_bytes(b"".join([first, second, *others, first[:40]]))
    assert logs.read_logs(folder, damaged=False) == known


def test_an_inline_run_has_a_report_without_a_timeline(tiny: Path, tmp_path: Path) -> None:
    in_process_run.run(resolved(tiny), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert complete_report(folder, None) is None
    page = folder.report.read_text()
    assert "Timeline of the silos" not in titles(page)
    assert "there is nothing to audit" in page


def test_the_report_and_the_audit_agree_on_what_left_the_silos(photo_run: RunFolder) -> None:
    run_report.write(photo_run, {})
    section = photo_run.report.read_text().partition('<h2 id="privacy">')[2].partition("<h2")[0]
    found = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", section)
    audit = audit_run(photo_run.root)
    silos = [name for name in audit.sent if name.startswith("silo-")]
    kinds = sorted({kind for name in silos for kind in audit.sent[name]})
    assert {"data_statement", "delta", "loss"} <= set(kinds)
    expected = []
    for kind in kinds:
        numbers = [audit.sent[name][kind] for name in silos if audit.sent[name][kind]]
        size = sum(audit.left[name][kind] for name in silos)
        row = (kind.replace("_", " "), str(len(numbers)), f"{sum(numbers):,}")
        expected.append((*row, size_text(size) if size else "numbers only"))
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
    lines = [
        MergeLine(
            kind="merge",
            version=version,
            now=0.0,
            replies=list(losses),
            staleness=[0, 0],
            loss=sum(losses.values()) / 2,
            losses=losses,
        )
        for version, losses in enumerate(found, 1)
    ]
    mean, each = figures.losses(lines)
    assert mean.traces[0]["y"] == [2.0, 0.75]
    assert [trace["x"] for trace in each.traces] == [[1, 2], [2]]
    assert "nothing to train on" in mean.note


def test_a_payload_kind_has_one_colour_in_both_traffic_figures(photo_run: RunFolder) -> None:
    summary = read_summary(photo_run)
    up, down = figures.traffic(logs.read_logs(photo_run).course, summary)
    traces = [(str(trace["name"]), str(trace["marker"])) for trace in up.traces + down.traces]
    kinds, pairs = {name for name, _ in traces}, set(traces)
    assert {"delta", "loss", "modality prototypes", "model"} <= kinds
    assert len({marker for _, marker in pairs}) == len(pairs) == len(kinds)


def test_a_small_perfect_run_has_its_size_no_certain_recalls_and_no_worst_cases(
    photo_run: RunFolder, tmp_path: Path
) -> None:
    complete_report(photo_run, None)
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
    assert "<td>mean_r10</td><td>-</td><td>-</td>" in page
    curves = dict(zip(titles(page), drawn(page), strict=True))["Retrieval on the held-out split"]
    assert [trace.name for trace in curves.data] == ["R@1", "R@5", "mAP"]
    assert "No text to image query went wrong" in page and "Worst cases" in page
    assert len(re.findall(r'<div class="query">', page)) == 6
    assert "virtual time [s]" in page and ">real time<" in page


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
    assert timeline(facts, ["silo-00", "silo-01"]) is not None
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
    side_by_side.write([photo_run, other], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "2 runs side by side" in page
    assert titles(page)[0] == "recall@1, mean"
    assert [trace.name for trace in drawn(page)[0].data] == ["run", "copy"]
    assert "cannot be compared" not in page
    summary = json.loads(other.summary.read_text())
    other.summary.write_text(json.dumps({**summary, "data_digest": "0" * 64}))
    side_by_side.write([photo_run, other], tmp_path / "page.html")
    assert "cannot be compared" in (tmp_path / "page.html").read_text()


def _copy(folder: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(folder.root, tmp_path / "copy")))
