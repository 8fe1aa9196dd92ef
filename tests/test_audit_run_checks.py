"""Message logs checked against their run folder: logs of another run, forged figures, swapped releases."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from coordinator.round_events import Phase
from fedmq.audit import result_checks
from fedmq.audit.findings import Cause
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import Evidence, verdict
from fedmq.cli.audit import print_audit
from fedmq.evaluation.recall import fairness_of, means
from fedmq.wire.messages import Reason
from tests import in_process_run, threaded_run
from tests.adversary_forged_logs import edit, edit_metrics, forge, lines, refused_record, rewrite
from tests.command_line import printed
from tests.threaded_run import resolved
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

HASHING = ("rounds=2", "protocol=fedcafe", "objective={base: dcmh, bits: 12, hidden: 16}")
MEMORY = "model/memory.safetensors"


@pytest.fixture(scope="module")
def honest(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its message logs and a memory file beside its model."""
    out = tmp_path_factory.mktemp("bound") / "run"
    assert threaded_run.run(resolved(tiny, *HASHING), out).phase is Phase.DONE
    return out


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


def found(run: Path) -> list[tuple[str, str]]:
    return [(finding.place.removeprefix(f"{run}/"), finding.what) for finding in audit_run(run).findings]


def places(run: Path) -> set[str]:
    return {place for place, _ in found(run)}


def negate_arrays(path: Path) -> None:
    """Negate every float32 array of a safetensors file in place."""
    save_file({name: -array if array.dtype == np.float32 else array for name, array in load_file(path).items()}, path)


def test_an_honest_run_has_no_findings(run: Path) -> None:
    assert (run / MEMORY).exists()
    assert found(run) == []


@pytest.mark.slow
def test_a_plain_audit_does_not_import_torch(run: Path) -> None:
    audit = "import sys, pathlib; from fedmq.audit.log_checks import audit_run; audit_run(pathlib.Path(sys.argv[1]))"
    code = f"{audit}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, run], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout == "False\n"


# ----------------------------------------------------------------------------------------------- logs of another run
def test_logs_of_another_run_are_found(run: Path, tiny: Path) -> None:
    (run / "scenario.yaml").write_text(resolved(tiny, *HASHING, "seed=8").dump())
    assert {f"{name}.jsonl" for name in ("coordinator", "evaluator", "silo-00")} <= {
        place.partition(":")[0] for place in places(run)
    }
    assert "of the run tiny-" in found(run)[0][1]
    (run / "scenario.yaml").unlink()
    assert found(run) == [("scenario.yaml", "no such file next to summary.json")]


def test_logs_of_two_runs_are_found_without_a_scenario(run: Path) -> None:
    for name in ("scenario.yaml", "summary.json"):
        (run / name).unlink()
    forge(run, "silo-00", lambda record: {**record, "run": "other"} if "run" in record else record)
    assert any("of the run other, but the first record is of tiny-" in what for _, what in found(run))


def test_logs_without_their_run_folder_are_checked_by_themselves(run: Path) -> None:
    for each in run.iterdir():
        if each.name != "messages":
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    assert found(run) == []


def test_logs_cut_before_the_first_task_are_found(run: Path) -> None:
    for path in (run / "messages").glob("*.jsonl"):
        content = lines(run, path.stem)
        first = next((n for n, line in enumerate(content) if '"kind":"task"' in line or '"evaluate"' in line), 1)
        rewrite(run, path.stem, content[:first])
    assert ("coordinator.jsonl", "no note of what was released, though the run is finished") in found(run)
    assert any("merged, but 0 were received" in what for _, what in found(run))


def test_a_silo_erased_from_every_log_is_found(run: Path) -> None:
    (run / "messages" / "silo-00.jsonl").unlink()
    ends = ("sender", "receiver", "peer", "silo")
    forge(run, "coordinator", lambda record: None if "silo-00" in [record.get(end) for end in ends] else record)
    findings = dict(found(run))
    assert findings["silo-00.jsonl"] == "no such log in this folder: summary.json mentions silo-00"
    assert "replies of silo-00 to version" in findings["metrics.jsonl"]


def peers(run: Path) -> list[str]:
    return [path.stem for path in (run / "messages").glob("*.jsonl") if path.stem != "coordinator"]


def kill_before(run: Path, note: str) -> None:
    """Cut all logs as they are if the coordinator is killed before it writes a note of its end, and then all others."""
    for name, last in [("coordinator", f'"{note}"'), *((each, '"stop"') for each in peers(run))]:
        content = lines(run, name)
        rewrite(run, name, content[: next(n for n, line in enumerate(content) if last in line)])


def test_an_unfinished_run_has_no_findings(run: Path) -> None:
    for name in ("summary.json", "model"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert any("there is no summary.json" in what for _, what in found(run))
    content = lines(run, "coordinator")
    kill_before(run, "released")
    assert found(run) == []
    assert ['"released"' in line for line in content].index(True) == len(content) - 4 - len(peers(run))
    assert '"ended"' in content[-2]
    assert '"signed"' in content[-1]


def test_a_run_killed_between_its_release_and_its_summary_has_no_findings(run: Path) -> None:
    (run / "summary.json").unlink()
    kill_before(run, "result_digests")
    assert found(run) == []


# ------------------------------------------------------------------------------------------------------- the release
@pytest.mark.parametrize("file", ["model/model.safetensors", MEMORY])
def test_a_swapped_file_is_found(run: Path, file: str) -> None:
    negate_arrays(run / file)
    assert places(run) - {"coordinator.jsonl"} >= {file}
    (run / file).unlink()
    assert file in places(run)


def test_a_missing_memory_is_found_even_if_config_json_does_not_name_it(run: Path) -> None:
    edit(run / "model" / "config.json", lambda config: config["released_with"].clear())
    (run / MEMORY).unlink()
    assert places(run) == {"model/config.json", MEMORY}
    edit(run / "summary.json", lambda summary: summary.pop("released_with"))
    assert places(run) == {"model/config.json", "summary.json", MEMORY}


def test_a_release_swapped_with_its_summary_and_note_is_found_by_what_the_evaluator_was_sent(
    run: Path, tiny: Path
) -> None:
    other = run.parent / "other"
    threaded_run.run(resolved(tiny, *HASHING, "seed=8"), other)
    shutil.rmtree(run / "model")
    shutil.copytree(other / "model", run / "model")
    theirs = json.loads((other / "summary.json").read_text())
    own = {name: theirs[name] for name in ("model_digest", "released_with")}
    edit(run / "summary.json", lambda summary: summary.update(own))
    flat = {"model_digest": own["model_digest"], **own["released_with"]}
    forge(run, "coordinator", lambda record: {**record, **flat} if record.get("event") == "released" else record)
    findings = [what for place, what in found(run) if place.startswith("coordinator.jsonl:")]
    heads = [what for what in findings if what.startswith("carries a head")]
    assert len(heads) == len(peers(run))  # in its last messages
    assert [what for what in findings if what not in heads] == [
        *(f"evaluator was sent another {kind} than is released" for kind in ("memory", "model")),
        "the log up to here is not what coordinator signed",
    ]


@pytest.mark.slow
def test_the_release_of_a_run_without_messages_is_checked_against_its_note(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    in_process_run.run(resolved(tiny, *HASHING), out)
    assert found(out) == []
    negate_arrays(out / MEMORY)
    assert places(out) == {MEMORY}
    told = printed("audit", out, code=3)
    assert "a memory with digest" in " ".join(told.split())


# ------------------------------------------------------------------------------------------------------- the figures
FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "metrics": lambda summary: summary["metrics"].update(mean_r1=0.99),
    "per_silo": lambda summary: summary["per_silo"]["silo-02"].update(mean_r1=0.99),
    "participations": lambda summary: summary["per_silo"]["silo-02"].update(participations=7),
    "versions": lambda summary: summary.update(versions=1),
    "model_digest": lambda summary: summary.update(model_digest="ab" * 32),
    "data_digest": lambda summary: summary.update(data_digest="ab" * 32),
    "no data_digest": lambda summary: summary.pop("data_digest"),
    "seed": lambda summary: summary.update(seed=99),
    "rounds": lambda summary: summary.update(rounds=99),
    "protocol": lambda summary: summary.update(protocol="rcsr"),
    "scenario": lambda summary: summary.update(scenario="other"),
    "fairness": lambda summary: summary["fairness"].update(worst_r1=0.99),
    "per_silo_mean": lambda summary: summary["per_silo_mean"].update(mean_r1=0.99),
    "tasks": lambda summary: summary["tasks"].update(merged=99),
}


def test_forged_figures_of_a_summary_are_found(run: Path) -> None:
    honest = (run / "summary.json").read_text()
    for what, forge_it in FORGED.items():
        (run / "summary.json").write_text(honest)
        edit(run / "summary.json", forge_it)
        assert places(run) & {"summary.json", "metrics.jsonl"}, what


@pytest.fixture(scope="module")
def personal_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose personal models were evaluated during the run and at its end."""
    out = tmp_path_factory.mktemp("own") / "run"
    settings = ("rounds=3", "protocol=fedper", "evaluation.personal_every=2")
    assert threaded_run.run(resolved(tiny, *settings), out).phase is Phase.DONE
    return out


def without_figures(summary: dict[str, Any]) -> None:
    for name in ("personal_whole_split", "personal_per_silo"):
        del summary[name]


def without_one_silo(summary: dict[str, Any]) -> None:
    for name in ("personal_whole_split", "personal_per_silo"):
        del summary[name]["silo-02"]
    whole, local = summary["personal_whole_split"], summary["personal_per_silo"]
    summary["personal"] = means(whole)
    summary |= {"personal_per_silo_mean": means(local), "personal_fairness": fairness_of(local)}


def with_invented_figures(summary: dict[str, Any]) -> None:
    for own in summary["personal_whole_split"].values():
        own["mean_r1"] = 0.99


@pytest.mark.slow
def test_forged_personal_metrics_of_a_summary_are_found(personal_run: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(personal_run, tmp_path / "run"))
    assert found(out) == []
    content = (out / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in content if not ('"personal"' in line and '"version": 3' in line)]
    (out / "metrics.jsonl").write_text("".join(line + "\n" for line in kept))
    honest = (out / "summary.json").read_text()
    for change, problem in (
        (lambda summary: summary["personal"].update(mean_r1=0.99), "personal does not match"),
        (without_figures, "personal does not match"),
        (without_one_silo, "no metrics of silo-02's personal model at version 3"),
        (with_invented_figures, "the metrics of silo-00's personal model at version 3 are not what it answered"),
    ):
        (out / "summary.json").write_text(honest)
        edit(out / "summary.json", change)
        assert any(what.startswith(problem) for _, what in found(out)), problem


def test_missing_personal_metrics_are_found_unless_the_measurement_itself_was_refused() -> None:
    course = result_checks.LoggedRun()
    course.measured["silo-00", 4].add("digest")
    course.take("line 1", refused_record("silo-00", Reason.GAP, frames=70))
    assert [one.what for one in result_checks._reported_not_recorded("metrics.jsonl", set(), course)] == [
        "no metrics of silo-00's personal model at version 4, though it answered"
    ]
    course.take("line 2", refused_record("silo-00", Reason.UNEXPECTED, frames=0))
    assert not list(result_checks._reported_not_recorded("metrics.jsonl", set(), course))


def test_forged_or_missing_lines_of_personal_metrics_are_found(personal_run: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(personal_run, tmp_path / "run"))
    edit_metrics(out, "personal", lambda line: line["personal"].update(mean_r1=0.99), 2)
    assert found(out) == [("metrics.jsonl: version 2", "personal does not match the metrics it is computed from")]
    edit_metrics(out, "personal", None)
    assert ("metrics.jsonl", "no metrics of silo-00's personal model at version 2, though it answered") in found(out)


def test_an_invented_figure_is_found(run: Path) -> None:
    edit(run / "summary.json", lambda summary: summary["per_silo"]["silo-02"].update(best_r1=0.99))
    assert found(run) == [
        ("summary.json", "the metrics of silo-02 are not those of the last evaluation in metrics.jsonl")
    ]


def test_the_method_named_in_the_release_is_checked_against_the_scenario(run: Path) -> None:
    edit(run / "model" / "config.json", lambda config: config.update(protocol="rcsr"))
    edit(run / "model" / "config.json", lambda config: config["objective"].update(bits=16))
    differs = "is not what scenario.yaml says"
    assert found(run) == [("model/config.json", f"protocol {differs}"), ("model/config.json", f"objective {differs}")]


def test_an_extra_file_next_to_the_release_is_found(run: Path) -> None:
    shutil.copy(run / MEMORY, run / "model" / "more.safetensors")
    assert [place for place, _ in found(run)] == ["model/more.safetensors"]
    (run / "model" / "more.safetensors").unlink()
    (run / "model" / "gallery").mkdir()  # what fedmq export puts there
    assert found(run) == []


def test_an_evaluation_missing_from_the_metrics_is_found(run: Path) -> None:
    edit_metrics(run, "evaluation", None, 0)
    assert found(run) == [("metrics.jsonl", "no metrics of version 0, though the evaluator answered")]


def test_a_run_made_to_look_unfinished_is_still_checked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    rewrite(run, "coordinator", lines(run, "coordinator")[:-2])  # without its last note, that the run has ended
    negate_arrays(run / "model" / "model.safetensors")
    assert places(run) == {"model/model.safetensors"}
    kill_before(run, "released")
    edit_metrics(run, "evaluation", FORGED["metrics"])
    assert places(run) == {"metrics.jsonl"}
    audit = audit_run(run)
    assert not audit.finished and audit.to_plain()["finished"] is False
    print_audit(audit, verdict(audit, Evidence()), Console())
    assert "the run has not finished" in capsys.readouterr().out


def test_figures_that_the_evaluator_never_sent_are_found(run: Path) -> None:
    edit_metrics(run, "evaluation", FORGED["metrics"], 2)
    edit(run / "summary.json", FORGED["metrics"])
    assert ("metrics.jsonl", "the metrics of version 2 are not what the evaluator answered") in found(run)
    assert places(run) == {"metrics.jsonl", "summary.json"}


def merges(run: Path, **changes: object) -> None:
    """Change the first merge in ``metrics.jsonl``."""
    edit_metrics(run, "merge", lambda line: line.update(changes), 1)


#: Changes that contradict nothing else in the run folder, nor any message, by file.
UNCONTRADICTED: list[tuple[str, Callable[[Path], None]]] = [
    ("metrics.jsonl", lambda run: merges(run, loss=0.0)),
    ("metrics.jsonl", lambda run: merges(run, now=0.5)),
    ("metrics.jsonl", lambda run: merges(run, wall="2020-01-01T00:00:00.000+00:00")),
    ("summary.json", lambda run: edit(run / "summary.json", lambda each: each.update(change=9.0))),
    ("summary.json", lambda run: edit(run / "summary.json", lambda each: each["seconds"].update(virtual=1.0))),
    ("summary.json", lambda run: edit(run / "summary.json", lambda each: each["tasks"].update(failed=7))),
    ("summary.json", lambda run: edit(run / "summary.json", lambda each: each["versions_of"].update(torch="9"))),
    ("agreement.json", lambda run: edit(run / "agreement.json", lambda each: each.update(run="other"))),
    ("model/config.json", lambda run: edit(run / "model" / "config.json", lambda each: each.update(label_names=["a"]))),
    (
        "scenario.yaml",
        lambda run: (run / "scenario.yaml").write_text((run / "scenario.yaml").read_text() + "# later\n"),
    ),
    ("model/README.md", lambda run: (run / "model" / "README.md").write_text("# The best model\n")),
]


def test_a_file_changed_after_the_end_is_found_by_the_coordinators_note(run: Path) -> None:
    for file, change in UNCONTRADICTED:
        before = (run / file).read_text()
        change(run)
        (finding,) = audit_run(run).findings
        assert (finding.cause, finding.place) == (Cause.FILE, str(run / file))
        (run / file).write_text(before)


def test_real_times_and_memory_may_be_completed_after_the_end(run: Path) -> None:
    edit(run / "summary.json", lambda each: each["seconds"].update(total=99.0, startup=1.0))
    edit(run / "summary.json", lambda each: each["processes"].update(peak_pss_mb=1.0))
    assert found(run) == []


def test_a_merge_of_a_reply_that_never_arrived_is_found(run: Path) -> None:
    def lost(record: dict[str, Any]) -> dict[str, Any] | None:
        return None if (record.get("kind"), record.get("sender")) == ("reply", "silo-00") else record

    forge(run, "coordinator", lost)
    assert ("metrics.jsonl", "1 replies of silo-00 to version 0 merged, but 0 were received") in found(run)


def test_an_unreadable_file_is_a_finding(run: Path) -> None:
    for name in ("summary.json", "metrics.jsonl", "model/config.json", "scenario.yaml"):
        before = (run / name).read_text()
        (run / name).write_text("[\n")
        assert any(place.startswith(name) for place in places(run)), name
        (run / name).write_text(before)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[]\n")
    ((place, what),) = found(run)
    assert re.fullmatch(r"metrics\.jsonl: line \d+", place)
    assert what == "[] instead of a line of a merge or an evaluation (a mapping)"
