"""Comparison files: the options of ``fedmq compare`` and ``fedmq sweep`` in a file; schemas of all files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from fedmq.cli import compare as cli_compare
from fedmq.cli import main as cli
from fedmq.cli import reference as schema_command
from fedmq.config.yaml_files import read_yaml
from fedmq.errors import InputError
from fedmq.experiments import files
from fedmq.experiments import grid as planning
from fedmq.experiments.files import SCHEMAS, schema_of
from tests.command_line import printed, refused
from tests.comparisons import comparison_file, resolve


@pytest.fixture
def options_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., cli_compare.Options]:
    """A function that parses a command into its options before anything is planned."""

    def options(*arguments: object) -> cli_compare.Options:
        found: list[cli_compare.Options] = []
        monkeypatch.setattr(cli_compare, "carry_out", found.append)
        CliRunner().invoke(cli.app, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False)
        return found[0]

    return options


WHOLE = """\
compare: ../tiny.yaml
set: [rounds=4, training.batch_size=16]
vary:
  - silos.count=4,5
  - >-
    protocol=
    fedavg,
    {name: rcsr, filler: zero}
select: training.learning_rate=0.1,0.2
select_seeds: [3, 6]
select_rounds: 2
seeds: [4, 5]
metric:
  - mean_r1,mean_r5
  - bytes.up
baseline: fedavg
across: silos.count
target: mean_r1=0.5
zero_shot: true
yardstick: classes
runs: shared
"""


SAME = [
    "--set", "rounds=4", "--set", "training.batch_size=16", "--vary", "silos.count=4,5",
    "--vary", "protocol=fedavg,{name: rcsr, filler: zero}", "--select", "training.learning_rate=0.1,0.2",
    "--select-seeds", "3,6", "--select-rounds", "2", "--seeds", "4,5", "--metric", "mean_r1,mean_r5,bytes.up",
    "--baseline", "fedavg", "--across", "silos.count", "--target", "mean_r1=0.5", "--zero-shot",
    "--yardstick", "classes", "--runs", "shared",
]  # fmt: skip


def test_a_comparison_file_equals_the_corresponding_command_line(
    tiny: Path, options_of: Callable[..., cli_compare.Options]
) -> None:
    by_file = options_of("compare", comparison_file(tiny.parent, WHOLE), "--jobs", 3)
    by_hand = options_of("compare", tiny, *SAME, "--jobs", 3)
    plans = [cli_compare.plan_of(options, resolve) for options in (by_file, by_hand)]
    assert by_file.files[0].samefile(tiny)
    assert (by_file.runs, by_file.jobs) == (by_hand.runs, 3)
    assert [replace(entry, file=tiny) for entry in plans[0].entries] == list(plans[1].entries)
    assert replace(plans[0], entries=()) == replace(plans[1], entries=())
    assert plans[0].select_seeds == (3, 6)
    folders = {planning.default_folder(plan, "compare", resolve) for plan in plans}
    assert len(folders) == 1


def test_command_line_options_override_a_comparison_file(
    tiny: Path, options_of: Callable[..., cli_compare.Options]
) -> None:
    file = comparison_file(tiny.parent, WHOLE)
    options = options_of(
        "compare", file, "--set", "rounds=7", "--vary", "silos.count=6", "--vary", "protocol.tau=0.1,0.2",
        "--select", "rcsr:training.learning_rate=1", "--seeds", "9", "--metric", "map", "--select-seeds", "0",
        "--baseline", "rcsr", "--target", "map=0.1", "--select-rounds", "1", "--runs", "mine", "--out", "out",
        "--across", "protocol.tau",
    )  # fmt: skip
    assert options.settings == ["rounds=4", "training.batch_size=16", "rounds=7"]
    assert [text.partition("=")[0] for text in options.vary or []] == ["silos.count", "protocol", "protocol.tau"]
    assert (options.vary or [])[0] == "silos.count=6"
    assert options.select == ["training.learning_rate=0.1,0.2", "rcsr:training.learning_rate=1"]
    assert (options.seeds, options.metric, options.baseline) == ("9", "map", "rcsr")
    assert (options.select_seeds, options.select_rounds, options.across) == ("0", 1, "protocol.tau")
    assert options.target == ["mean_r1=0.5", "map=0.1"]
    assert options.zero_shot
    assert (options.runs, options.out_dir) == (Path("mine"), Path("out"))
    (first, *_) = cli_compare.plan_of(replace(options, baseline=None), resolve).entries
    with pytest.raises(InputError, match=r"--across.*'rounds', allowed: silos\.count or protocol\.tau"):
        cli_compare.plan_of(replace(options, baseline=None, across="rounds"), resolve)
    assert resolve(first.file, list(first.settings), None).scenario.rounds == 7


def test_settings_of_a_file_are_kept_unless_the_command_line_replaces_them(
    tiny: Path, options_of: Callable[..., cli_compare.Options]
) -> None:
    text = "compare: ../tiny.yaml\nvary:\n  - 'set={rounds: 3},{rounds: 4}'\n  - 'set={device: cpu},{device: auto}'\n"
    file = comparison_file(tiny.parent, text)
    assert len(options_of("compare", file).vary or []) == 2
    assert options_of("compare", file, "--vary", "set={rounds: 5},{rounds: 6}").vary == ["set={rounds: 5},{rounds: 6}"]


def test_a_comparison_file_of_a_sweep_can_choose_among_its_varied_values(
    tiny: Path, options_of: Callable[..., cli_compare.Options]
) -> None:
    file = comparison_file(tiny.parent, "sweep: ../tiny.yaml\nvary: training.learning_rate=0.1,0.2\nselect: val\n")
    options = options_of("sweep", file)
    assert (options.vary, options.select) == (None, ["training.learning_rate=0.1,0.2"])
    assert options_of("sweep", file, "--select", "protocol.tau=0.1,0.2").select == [
        "protocol.tau=0.1,0.2",
        "training.learning_rate=0.1,0.2",
    ]


#: What is added to a comparison file, the place that the error names, and the value.
REFUSED = (
    ("vary: [silos.count]", "line 2: vary.0", "silos.count"),
    ("vary: [{silos.count: [4, 5]}]", "line 2: vary.0", "a mapping"),
    ("set: [rounds]", "line 2: set.0", "rounds"),
    ("seeds: true", "line 2: seeds", True),
    ("metric: a b", "line 2: metric", "a b"),
    ("target: mean_r1", "line 2: target.0", "mean_r1"),
    ("select_rounds: 0", "line 2: select_rounds", 0),
    ("select_seeds: [1, 1]", "line 2: select_seeds", "1,1"),
    ("metrik: mean_r1", "line 2: metrik", "metrik"),
    ("select: [val]", "select", "val"),
)


def test_a_bad_comparison_file_is_refused_with_its_line_key_and_value(tiny: Path) -> None:
    for text, place, value in REFUSED:
        file = comparison_file(tiny.parent, f"compare: ../tiny.yaml\n{text}\n")
        with pytest.raises(InputError) as caught:
            files.read_comparison(file)
        assert (caught.value.place, caught.value.found) == (f"{file}: {place}", value)


def test_a_comparison_file_excludes_scenario_arguments_and_must_name_scenarios(tiny: Path) -> None:
    for text, words in (
        ("sweep: ../tiny.yaml", "both compare and sweep"),
        ("baseline: moon", "baseline: found 'moon'"),
    ):
        assert words in refused("compare", comparison_file(tiny.parent, f"compare: ../tiny.yaml\n{text}\n"))
    file = comparison_file(tiny.parent, "compare: ../tiny.yaml\n")
    assert "key compare" in refused("sweep", file)
    assert "one comparison file alone" in refused("compare", tiny, file)
    assert "a scenario, not a comparison file" in refused(
        "compare", comparison_file(tiny.parent, "compare: [table.yaml]\n")
    )
    assert "'nowhere.yaml'" in refused("compare", comparison_file(tiny.parent, "compare: [nowhere.yaml]\n"))
    assert "at least 1" in refused("compare", comparison_file(tiny.parent, "compare: []\n"))
    nothing_varied = comparison_file(tiny.parent, "sweep: ../tiny.yaml\n")
    assert f"{nothing_varied}: vary: found 'nothing'" in refused("sweep", nothing_varied)


def test_a_scenario_with_too_long_a_name_is_not_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text, reader in (
        ("compare: NAME", files.read_comparison),
        ("tune: NAME\nsearch: {rate: [1, 2]}", files.read_search),
    ):
        path.write_text(text.replace("NAME", "a" * 5000))
        with pytest.raises(InputError, match="a scenario file, relative to"):
            reader(path)


# ------------------------------------------------------------------------------------------------------------ schemas
ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "scenarios").rglob("*.yaml"))


@functools.cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def kind_of(raw: Mapping[str, object]) -> str:
    if "tune" in raw:
        return "tuning"
    return "comparison" if raw.keys() & {"compare", "sweep"} else "scenario"


@pytest.mark.slow
def test_every_file_of_scenarios_is_valid() -> None:
    known = {kind: validator(kind) for kind in SCHEMAS}
    kinds = set()
    for path in FILES:
        raw = read_yaml(path)
        kinds.add(kind_of(raw))
        found = [error.message for error in known[kind_of(raw)].iter_errors(raw)]
        assert not found, (path, found)
    assert kinds == SCHEMAS.keys() - {"site"}


TEXTS = (
    ("scenario", "{name: a, protocol: fedavg, participation: 0.5, track: csv, objective: dcmh}", True),
    ("scenario", "{name: a, protocol: {name: rcsr, lambda_anc: 1}, faults: [{kind: late, seconds: 5}]}", True),
    ("scenario", "{name: a, protocol: rcsr, round: 3}", False),
    ("scenario", "{name: a, protocol: rcsr, faults: [{kind: late, second: 5}]}", False),
    ("site", "{name: silo-00, data: {name: manifest, path: x}, modalities: [image]}", True),
    ("site", "{file: x}", False),
    ("comparison", "{sweep: a.yaml, vary: 'rounds=1,2', seeds: 0, metric: [mean_r1, map]}", True),
    ("comparison", "{compare: [a.yaml], sweep: b.yaml}", False),
    ("tuning", "{tune: a.yaml, search: {rounds: [1, 2], training.learning_rate: {low: 1, high: 2}}}", True),
    ("tuning", "{tune: a.yaml, search: {training.learning_rate: {low: 1}}}", False),
)


def test_a_schema_takes_short_forms_and_refuses_what_the_model_refuses() -> None:
    for kind, text, valid in TEXTS:
        assert validator(kind).is_valid(yaml.safe_load(text)) is valid, text


def test_the_command_prints_the_schema_of_each_kind() -> None:
    assert tuple(SCHEMAS) == schema_command.KINDS
    assert json.loads(printed("schema", "site")) == schema_of("site")
    assert "one of scenario, site" in refused("schema", "yaml")
