"""The comparisons that documents print can be planned: rows and candidates are scenarios that their methods take."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.testing import CliRunner

from fedmq.cli import compare
from fedmq.cli import main as cli
from fedmq.config.resolve import load
from fedmq.config.scenario import Scenario
from fedmq.experiments.grid import Entry
from fedmq.experiments.summary import parse_metrics
from fedmq.federation import preflight
from tools.document_checks import ROOT, pages, printed

pytestmark = pytest.mark.slow

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
