"""The smallest example of docs/howto/own_sites.md works as printed, and printed comparisons can be planned."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.attacks import free_port
from fedmq.cli import compare
from fedmq.cli import main as cli
from fedmq.cli.options import ProcessOptions, silo_arguments
from fedmq.cli.scenarios import resolved_file
from fedmq.config.resolve import load
from fedmq.config.scenario import Scenario
from fedmq.experiments.grid import Entry
from fedmq.experiments.summary import parse_metrics
from fedmq.federation import preflight
from silos.program import run_silo
from tests.own_data_sites import outputs
from tests.waiting import PATIENCE
from tools.document_checks import ROOT, pages, printed

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "own_sites.md"


def blocks() -> list[str]:
    """The indented blocks of the example, without their indent."""
    text = PAGE.read_text(encoding="utf-8").partition("## The smallest example")[2].partition("\n## ")[0]
    found = re.findall(r"(?:^ {4}.*\n|(?<=\n)\n(?= {4}))+", text, flags=re.MULTILINE)
    return [re.sub(r"^ {4}", "", each, flags=re.MULTILINE).strip("\n") + "\n" for each in found]


def block(start: str) -> str:
    (found,) = [each for each in blocks() if each.startswith(start)]
    return found


def typed(command: str) -> str:
    done = CliRunner().invoke(cli.app, shlex.split(command)[1:])
    assert done.exit_code == 0, f"{command}\n{done.output}"
    return done.output


def test_the_smallest_example_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))
    port = str(free_port())
    for folder in ("coordinator", "berlin", "lyon", "oslo"):
        Path(folder).mkdir()
    Path("own.yaml").write_text(block("name: own\n"))
    exec(compile(block("import numpy"), "the page", "exec"), {})
    for command in block("fedmq init").replace("5555", port).splitlines():
        typed(command)
    printed_site = yaml.safe_load(block("name: silo-00\n").replace("5555", port))
    assert yaml.safe_load(Path("berlin", "silo.yaml").read_text()) == printed_site
    for command in block("fedmq keys new").splitlines():
        typed(command)
    coordinator, *silos = block("fedmq coordinator").replace("5555", port).splitlines()
    program = [sys.executable, "-m", *shlex.split(coordinator)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    threads = []
    for command in silos:
        words = shlex.split(command)
        assert words[1] == "silo" and words[3] == "--site"
        run = resolved_file(Path(words[2]), manual=True)
        arguments = silo_arguments(run, ProcessOptions(site=Path(words[4])))
        threads.append(threading.Thread(target=run_silo, args=(arguments,)))
        threads[-1].daemon = True
        threads[-1].start()
    (printed,) = outputs([process])
    assert process.returncode == 0, printed
    for thread in threads:
        thread.join(PATIENCE)
    assert re.search(r"^metrics: R@1 .* \(of round 3\)$", typed("fedmq status coordinator/run"), flags=re.MULTILINE)
    (audit,) = block("fedmq audit").splitlines()
    assert "the logs are consistent" in typed(audit)
    (search,) = re.findall(r"^ {4}(fedmq search \S+ --item .*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert "berlin-0" in typed(search)
    done = CliRunner().invoke(cli.app, shlex.split(search.replace("coordinator/run", "berlin/run"))[1:])
    assert done.exit_code and "the folder of silo-00" in str(done.exception)


# -------------------------------------------------------------------------------------------------------- comparisons
#: The commands that compare, by page; in the reference a word in capitals stands for a file.
COMMANDS = {
    page.relative_to(ROOT).as_posix(): commands
    for page in pages()
    if (commands := {text for text in printed(page) if re.match(r"(compare|sweep) (?![A-Z])", text)})
}


def planned(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[Entry, ...], compare.Options]:
    """The rows of a comparison, and its options."""
    options: list[compare.Options] = []
    monkeypatch.setattr(compare, "carry_out", options.append)
    CliRunner().invoke(cli.app, shlex.split(command, comments=True), catch_exceptions=False, standalone_mode=False)
    return compare.plan_of(options[0]).entries, options[0]


def measures(scenario: Scenario, metric: str) -> bool:
    """Whether a run of a scenario can have a metric, as far as its name says: cut-offs, silos, images by images."""
    evaluation = scenario.evaluation
    cuts = {"map": evaluation.map_at, "ndcg": evaluation.ndcg_at}
    return (
        all(int(cut) in cuts[kind] for kind, cut in re.findall(r"(map|ndcg)_at(\d+)", metric))
        and all(silo in scenario.silo_names for silo in re.findall(r"silo-\d+", metric))
        and (evaluation.within or "i2i" not in metric)
    )


@pytest.mark.parametrize("page", COMMANDS)
def test_every_comparison_that_a_page_prints_can_be_planned(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows have one budget; those of a comparison file of a paper have the metrics of its columns."""
    monkeypatch.setattr(preflight, "refuse_scenario", lambda _source: None)  # the data need not be here
    monkeypatch.chdir(ROOT)
    for command in COMMANDS[page]:
        entries, options = planned(command, monkeypatch)
        assert len({len(entry.candidates) for entry in entries}) == 1, command
        if options.source is not None and options.source.parent.parent.parent.name == "scenarios":
            assert len(entries) > 1 and str(options.runs).startswith(f"runs/{options.source.parts[1]}"), command
            for entry in entries:
                scenario = load(entry.file, entry.settings)
                for metric in parse_metrics(options.metric or ""):
                    assert measures(scenario, metric), (command, entry.name, metric)
