"""README and CONTRIBUTING agree with the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import protocols
from fedmq.cli import compare, key_reference
from fedmq.cli import main as cli
from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Objective, Scenario
from fedmq.encoders.base import InputSpec
from fedmq.experiments.grid import Entry
from fedmq.experiments.summary import parse_metrics
from fedmq.federation import preflight
from fedmq.models import hash_networks
from tools import make_reference

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "scenarios/**/*.md", "fedmq/**/*.md") for path in ROOT.glob(pattern)
)
PRINTED = re.compile(r"^ {4}(?:\$ )?(?:\.venv/bin/)?fedmq ((?:.*\\\n)*.*)$", flags=re.MULTILINE)
#: Pages whose commands are typed as they stand; the reference also prints patterns, with words in place of values.
TYPED = [page for page in PAGES if page.parent.name != "reference" and PRINTED.search(page.read_text())]
COMPARISONS = sorted((ROOT / "scenarios").glob("*/tables/*.yaml"))


def printed(page: Path) -> list[str]:
    """The commands that a page prints, without `fedmq`, each on one line."""
    return [command.replace("\\\n", " ") for command in PRINTED.findall(page.read_text())]


def comparisons(page: Path) -> list[str]:
    """The commands of a page that compare; a word in capitals stands for a file in the reference."""
    return [
        command
        for command in printed(page)
        if command.startswith(("compare ", "sweep ")) and not re.match(r"\w+ [A-Z]", command)
    ]


def named_comparisons() -> list[str]:
    """The commands with a comparison file that the READMEs of the papers print."""
    pages = sorted((ROOT / "scenarios").glob("*/README.md"))
    return [command for page in pages for command in comparisons(page) if "/tables/" in command]


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: the headings, as GitHub makes names of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


DOCUMENTS = sorted(page.relative_to(ROOT).as_posix() for page in PAGES if comparisons(page))


def test_the_readme_begins_with_the_two_commands() -> None:
    commands = re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands[:2] == ["run", "test"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_a_page_of_results_is_short() -> None:
    results = [page for page in PAGES if page.parts[-2] == "results"]
    assert not [page.stem for page in results if len(page.read_text().splitlines()) > 120]


def test_no_line_of_a_document_is_long() -> None:
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert not long


def test_no_cell_of_a_table_is_a_paragraph() -> None:
    cells = [
        cell.strip()
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
        for cell in line.strip("|").split(" | ")
    ]
    assert not [cell for cell in cells if len(cell) > 100 or re.search(r"\. [A-Z]", cell)]


def test_every_scenario_is_in_the_list_of_scenarios_and_the_other_way_round() -> None:
    named = set(re.findall(r"`(\w+\.yaml)`", (ROOT / "scenarios" / "README.md").read_text()))
    assert {path.name for path in (ROOT / "scenarios").glob("*.yaml")} == named


def missing(page: Path) -> list[str]:
    """The files and anchors that a page names and that do not exist."""
    text = page.read_text(encoding="utf-8")
    to_be_made = re.findall(r"A new file, `(\S+)`:", text)
    named = re.findall(r"`((?:fedmq|protocols|tests|tools|docs|coordinator|silos|scenarios)/[\w/.]+\.\w+)`", text)
    files = [name for name in named if "mine" not in name and name not in to_be_made and not (ROOT / name).exists()]
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            files.append(link)
    return files


def test_files_the_documents_name_exist() -> None:
    assert not {page.relative_to(ROOT).as_posix(): names for page in PAGES if (names := missing(page))}


def test_every_document_is_linked_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)]+)\)", index.read_text())
    }
    pages = [page for page in PAGES if page.parent.name in ("tutorial", "howto", "reference", "explanation")]
    assert not [page.name for page in pages if page.resolve() not in linked]


def test_the_reference_pages_match_the_code() -> None:
    for name, made in make_reference.pages().items():
        page = ROOT / "docs" / "reference" / name
        assert page.read_text(encoding="utf-8") == made, "python tools/make_reference.py writes it"


def test_every_command_a_document_prints_is_one_of_the_program_with_these_options() -> None:
    known = make_reference.commands()
    for command in (command for page in TYPED for command in printed(page)):
        words = shlex.split(command, comments=True)
        words = [word for word in words if word != "&"]
        if words in (["--help"], ["--install-completion"]):  # of the program itself
            continue
        size = 2 if " ".join(words[:2]) in known else 1
        assert " ".join(words[:size]) in known, command
        parameters = known[" ".join(words[:size])].params
        options = {name: each for each in parameters for name in each.opts if name.startswith("-")}
        values, given = [], set()
        rest = iter(words[size:])
        for word in rest:
            if word.startswith("--"):
                assert word in options, f"{word} of {command}"
                given.add(word)
                if not options[word].is_flag:
                    assert next(rest, "--").startswith("--") is False, f"{word} of {command} needs a value"
            else:
                values.append(word)
        arguments = [each for each in parameters if not each.opts[0].startswith("-")]
        least, most = sum(each.required for each in arguments), sum(1 if each.nargs == 1 else 99 for each in arguments)
        assert least <= len(values) <= most, command
        assert {name for name, each in options.items() if each.required} <= given, command
        for value in values:
            if value.startswith(("scenarios/", "docs/")):
                assert (ROOT / value).exists(), value


def test_every_key_and_option_has_a_meaning() -> None:
    keys = [key for _, own in (*key_reference.parts().values(), *key_reference.faults().values()) for key in own]
    assert len(keys) > 150
    keys += [key for name in protocols.names() for key in key_reference.options(protocols.load(name).Options)]
    keys += [key for name in protocols.losses() for key in key_reference.loss(protocols.loss(name))]
    assert not [key.name for key in keys if len(key.meaning) < 4 or not key.values or "anything" in key.values]


@pytest.mark.parametrize("name", protocols.losses())
def test_the_sizes_in_the_reference_are_those_of_the_network(name: str) -> None:
    stated = {key.name: int(key.default) for key in key_reference.loss(protocols.loss(name))[:2]}
    model = hash_networks.build(Objective(base=name), InputSpec((7,), (5,)), 3, 0, torch.device("cpu"))
    assert model.outputs("text", torch.ones(2, 5)).code.shape == (2, stated["bits"])
    rows = {entry.shape[0] for entry in model.layout.entries if entry.name.startswith("text.")}
    assert stated["hidden"] in rows


def test_the_methods_have_a_line_for_the_listing() -> None:
    assert all(len(protocols.summary(name)) > 20 for name in protocols.names())


def test_nothing_committed_names_a_host_of_a_registry_or_a_path_of_one_machine() -> None:
    hosts = r"pypi\.org/simple|pythonhosted|download\.pytorch|registry\.npmjs|deb\.debian|/work/|/opt/pypi"
    folders = [folder for folder in ROOT.glob("[a-z]*/") if folder.name not in ("runs", "build", "dist", "site")]
    for folder in (*folders, ROOT / ".ci", ROOT):
        for path in folder.glob("*") if folder == ROOT else folder.rglob("*"):
            text = path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".env", ".service", ""} and path.is_file()
            if text and path != Path(__file__) and "__pycache__" not in path.parts and path.name != ".git":
                assert not re.search(hosts, path.read_text(encoding="utf-8", errors="replace")), path


def planned(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[Entry, ...], compare.Options]:
    """The rows of a comparison, of which every candidate is a scenario its method takes, and the options."""
    found: list[tuple[tuple[Entry, ...], compare.Options]] = []

    def only_resolve(options: compare.Options, roots: compare.Roots) -> None:
        entries = compare.plan_of(options, roots.resolve).entries
        for entry in entries:
            for candidate in entry.candidates:
                roots.resolve(entry.file, [*entry.settings, *candidate], None)
        found.append((entries, options))

    monkeypatch.setattr(compare, "carry_out", only_resolve)
    monkeypatch.setattr(preflight, "refuse_scenario", lambda _source, _plug_ins: None)  # the data need not be here
    monkeypatch.chdir(ROOT)
    CliRunner().invoke(cli.app, shlex.split(command, comments=True), catch_exceptions=False, standalone_mode=False)
    return found[0]


def measures(scenario: Scenario, metric: str) -> bool:
    """Whether a run of a scenario can have a metric, as far as its name says: cut-offs, silos, images by images."""
    evaluation = scenario.evaluation
    cuts = {"map": evaluation.map_at, "ndcg": evaluation.ndcg_at}
    return (
        all(int(cut) in cuts[kind] for kind, cut in re.findall(r"(map|ndcg)_at(\d+)", metric))
        and all(silo in scenario.silo_names for silo in re.findall(r"silo-\d+", metric))
        and (evaluation.within or "i2i" not in metric)
    )


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_comparison_a_document_prints_can_be_planned(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row and candidate is a scenario its method takes, the baseline is a row, and all rows have one budget."""
    for command in set(comparisons(ROOT / document)) - set(named_comparisons()):
        entries, _ = planned(command, monkeypatch)
        assert len({len(entry.candidates) for entry in entries}) == 1, command


@pytest.mark.slow
@pytest.mark.parametrize("paper", sorted({path.parts[-3] for path in COMPARISONS}))
def test_every_comparison_file_of_a_paper_can_be_planned(paper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is printed, with columns that the rows measure; its runs are in its paper's folder."""
    commands = {shlex.split(command)[1]: command for command in named_comparisons()}
    for path in (path for path in COMPARISONS if path.parts[-3] == paper):
        entries, options = planned(commands[path.relative_to(ROOT).as_posix()], monkeypatch)
        assert len({len(entry.candidates) for entry in entries}) == 1, path
        assert len(entries) > 1, path
        for entry in entries:
            scenario = scenarios.load(entry.file, entry.settings)
            for metric in parse_metrics(options.metric or ""):
                assert measures(scenario, metric), (path, entry.name, metric)
        assert str(options.runs_dir).startswith(f"runs/{paper}"), path


def test_every_comparison_file_is_in_its_readme_with_one_command_and_the_other_way_round() -> None:
    named = [shlex.split(command)[1] for command in named_comparisons()]
    assert sorted(named) == sorted(path.relative_to(ROOT).as_posix() for path in COMPARISONS)


def test_a_comparison_file_says_first_what_of_its_paper_it_prints() -> None:
    paper = {"rcsr": "RCSR", "fedcafe": "FedCAFE", "fedhap": "FedHAP", "fedscmr": "FedSCMR", "feduch": "FedUCH"}
    for path in COMPARISONS:
        head = path.read_text().split("\n")[0]
        part = r"(, (table|figure|appendix)| on | with |, readings of the paper:)"
        assert re.match(f"# {paper[path.parts[-3]]}{part}", head), f"{path}: {head}"


def test_the_help_of_a_run_says_where_every_key_is_explained() -> None:
    shown = CliRunner().invoke(cli.app, ["scenario", "--help"], env={"COLUMNS": "200"}).output
    for page in re.findall(r"docs/[a-z/_]+\.md", shown):
        assert (ROOT / page).is_file()
    assert {"docs/reference/scenario.md", "docs/reference/methods.md"} <= set(re.findall(r"docs/[a-z/_]+\.md", shown))
