"""Scenario files, site files and --set settings: how YAML is read, and the errors for what is refused."""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

import protocols
from fedmq.audit.policy import read_policy
from fedmq.config import resolve as scenarios
from fedmq.config import yaml_files
from fedmq.config.resolve import read, resolve
from fedmq.config.scenario import Scenario, Training
from fedmq.config.site import read_site
from fedmq.config.yaml_files import read_yaml
from fedmq.errors import InputError
from fedmq.experiments import files
from fedmq.wire.keys import init_keys
from tests.command_line import refused
from tests.own_data_sites import COMMON
from tests.threaded_run import run_of

FILES = sorted((Path(__file__).parent.parent / "scenarios").rglob("*.yaml"))
SCENARIOS = [path for path in FILES if path.parent.name not in ("tables", "tune")]


def test_loading_a_comparison_file_as_a_scenario_names_the_command_that_runs_it() -> None:
    for path in set(FILES) - set(SCENARIOS):
        command = next(command for command in ("compare", "sweep", "tune") if command in read_yaml(path))
        kind = "tuning" if command == "tune" else "comparison"
        with pytest.raises(InputError, match=f"a {kind} file.*fedmq {command}"):
            scenarios.load(path)


#: A setting, the key that the error names after ``--set``, and the value that it shows; None for any value.
REFUSED = [
    ("partition.alpha=0", "partition.alpha", 0),
    ("partition.alpha=-1", "partition.alpha", -1),
    ("partition.alpha=.nan", "partition.alpha", None),
    ("partition.kind=dirichlet", "partition.kind", "dirichlet"),
    ("rounds=0", "rounds", 0),
    ("rounds", "", "rounds"),
    ("=3", "", "=3"),
    ("rounds=many", "rounds", "many"),
    ("rounds=true", "rounds", True),
    ("rounds=2026-13-01", "rounds", "2026-13-01"),
    (f"rounds={'[' * 20000}", "rounds", None),
    ("participation=0", "participation", 0),
    ("participation=7", "participation", 7),
    ("participation=true", "participation", True),
    ("seed=-1", "seed", -1),
    ("seed=false", "seed", False),
    ("missing_modality.rate=2", "missing_modality.rate", 2),
    ("silos=4", "silos", 4),
    ("silos.count=0", "silos.count", 0),
    ("silos.number=3", "silos.number", "number"),
    ("colour=red", "colour", "colour"),
    ("device=gpu", "device", "gpu"),
    ("training.learning_rate=0", "training.learning_rate", 0),
    ("aggregation.mode=magic", "aggregation.mode", "magic"),
    ("aggregation.over_select=0.5", "aggregation.over_select", 0.5),
    ("aggregation.buffer=0", "aggregation.buffer", 0),
    ("aggregation.mixing=0", "aggregation.mixing", 0),
    ("aggregation.max_staleness=-1", "aggregation.max_staleness", -1),
    ("aggregation.staleness.kind=cubic", "aggregation.staleness.kind", "cubic"),
    ("aggregation.on_lost=panic", "aggregation.on_lost", "panic"),
    ("participation.kind=lottery", "participation.kind", "lottery"),
    ("cost.preset=moon", "cost.preset", "moon"),
    ("name=Has Spaces", "name", "Has Spaces"),
    ("faults=[{kind: damage}]", "faults: faults.0", None),
    ("faults=[{share: 0.1}]", "faults: faults.0", None),
    ("faults=[drop]", "faults: faults.0", "drop"),
    ("faults={kind: drop}", "faults", None),
    ("faults=[{kind: drop, silos: nobody}]", "faults: faults.0.silos", "nobody"),
    ("faults=[{kind: drop, rounds: 1.5}]", "faults: faults.0.rounds", 1.5),
    ("faults=[{kind: late}]", "faults: faults.0.seconds", "nothing"),
    ("name.sub=1", "name.sub", None),
]


def test_a_refused_setting_gives_one_line_with_its_key_and_value(tiny: Path) -> None:
    for setting, place, value in REFUSED:
        with pytest.raises(InputError) as caught:
            scenarios.load(tiny, [setting])
        assert caught.value.place.removeprefix(f"{tiny}: ").startswith(f"--set {place}".rstrip()), setting
        assert value is None or caught.value.found == value, setting
        text = str(caught.value)
        assert "\n" not in text and "line" not in text and len(text) < 600, "no line of the file has that value"


def test_keys_that_do_not_fit_together_and_misspelt_ones_are_refused_with_what_is_meant(tiny: Path) -> None:
    for setting, words in (
        ("privacy.noise_multiplier=1", "found .keys that do not fit together., allowed: .*clip_norm"),
        ("privacy.noise_from=key", "privacy.noise_multiplier above 0"),
        ("missing_modality.silos={silo-99: image}", "silo-99"),
        ("participation.kind=availability", "participation"),
        ("participation={kind: availability, trace: x.csv, diurnal: {}}", "participation"),
        ("participation.diurnal={}", "participation"),
        ("participation={kind: availability, diurnal: {}, repeat: 5}", "participation"),
        ("participation={kind: availability, diurnal: {share: 0}}", "participation"),
        ("participation=half", "participation"),
        ("cost.classes={a: {share: 0.6, slowdown: 1}, b: {share: 0.6, slowdown: 1}}", "cost"),
        ("cost.classes={a: {silos: [silo-01], slowdown: 1}, b: {silos: [silo-01], slowdown: 1}}", "cost"),
        ("cost.classes={a: {silos: [silo-99], slowdown: 2}}", "silo-00 to silo-03"),
        ("aggregation.robust={rule: krum, keep: 4}", r"aggregation.robust.keep \(4\) must be below silos.count \(4\)"),
        ("participation.minimum=5", r"participation.minimum \(5\) must be at most silos.count \(4\)"),
        ("evaluation.keep=best", r"needs evaluation\.split val: test items must not choose the model"),
        ("evaluation={split: val, every: 0, patience: 2}", r"evaluation\.every above 0"),
        ("backbone.adapter_site=blocks", "open_clip"),
        ("roundz=3", r"did you mean rounds\?$"),
        ("aggregation.staleness.kindd=hinge", r"did you mean kind\?$"),
        ("faults=[{kind: drop, agin: 3}]", r"did you mean again\?$"),
    ):
        with pytest.raises(InputError, match=words):
            scenarios.load(tiny, [setting])


def test_files_other_than_scenarios_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    with pytest.raises(InputError, match="no such file"):
        scenarios.load(path)
    for content, words in (
        ("a: [1", "line 1"),
        ("- a\n- b\n", "list"),
        ("", "NoneType"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("name: x\n", "allowed: a value, as this key is required"),
        ("name: x\nrounds: {{ rounds }}\n", "line 2"),
        ("[" * 20000, "nested"),
        ("name: x\nprotocol: fedavg\n", "a section data"),
    ):
        path.write_text(content)
        with pytest.raises(InputError) as caught:
            scenarios.load(path)
        assert words in str(caught.value) and "\n" not in str(caught.value), content


def test_all_unknown_keys_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: x\nroundz: 3\nprotocol: fedavg\ndata: {name: openmoji}\nsilos:\n  cuont: 3\n  slotz: 1\n")
    with pytest.raises(InputError, match=r"unknown as well: ") as caught:
        scenarios.load(path)
    for place in ("line 2: roundz", "line 6: silos.cuont", "line 7: silos.slotz"):
        assert place in str(caught.value)


def test_numbers_in_yaml_notation_are_read_as_numbers(tiny: Path) -> None:
    scenario = scenarios.load(tiny, ["training.learning_rate=1e-4", "rounds=7", "evaluation.within=false"])
    assert (scenario.training.learning_rate, scenario.rounds, scenario.evaluation.within) == (1e-4, 7, False)


#: Settings in their order, a section, and what is in it then.
IN_ORDER = (
    (["protocol.tau=0.5", "protocol=fedavg"], "protocol", {"name": "fedavg", "tau": 0.5}),
    (["protocol.tau=0.5", "protocol={name: fedavg, tau: 0.2}"], "protocol", {"name": "fedavg", "tau": 0.2}),
    (["protocol={name: fedavg, tau: 0.2}", "protocol.tau=0.5"], "protocol", {"name": "fedavg", "tau": 0.5}),
    (["protocol={name: fedavg, tau: 0.2}", "protocol=fedavg"], "protocol", {"name": "fedavg"}),
    (["objective.bits=16", "objective=dcmh"], "objective", {"base": "dcmh", "bits": 16}),
    (["participation.kind=by_data", "participation=0.5"], "participation", {"kind": "by_data", "rate": 0.5}),
    (["aggregation.robust.rule=krum", "aggregation={robust: {trim: 0.1}}"], "aggregation.robust", {"rule": "krum"}),
    (["aggregation.robust.rule=krum", "aggregation={robust: {rule: none}}"], "aggregation.robust", {"rule": "none"}),
)


def test_setting_a_parent_key_keeps_earlier_settings_below_it(tiny: Path) -> None:
    for settings, part, wanted in IN_ORDER:
        section = scenarios.load(tiny, settings).model_dump()
        for key in part.split("."):
            section = section[key]
        assert {**section, **wanted} == section, settings
        assert part != "protocol" or section.keys() == wanted.keys(), "the file's section is replaced"


def test_settings_apply_to_every_section_and_do_not_change_the_file(tiny: Path) -> None:
    before = tiny.read_text()
    scenario = scenarios.load(
        tiny, ["protocol.name=fedavg", "partition.alpha=3", "training.batch_size=7", "protocol.tau=0.5"]
    )
    assert scenario.protocol.name == "fedavg"
    assert (scenario.partition.alpha, scenario.training.batch_size, scenario.protocol.options["tau"]) == (3.0, 7, 0.5)
    assert tiny.read_text() == before


def test_a_dump_reads_back_as_the_same_scenario(tiny: Path, tmp_path: Path) -> None:
    scenario = scenarios.load(tiny)
    path = tmp_path / "again.yaml"
    path.write_text(scenario.dump())
    assert scenarios.load(path) == scenario
    assert set(yaml.safe_load(path.read_text())) == set(type(scenario).model_fields)


def test_silos_are_named_with_two_digits_or_as_many_as_needed(tiny: Path) -> None:
    assert scenarios.load(tiny).silo_names == ("silo-00", "silo-01", "silo-02", "silo-03")
    wide = scenarios.load(tiny, ["silos.count=101", "missing_modality.silos={}"])
    assert (wide.silo_names[0], wide.silo_names[-1]) == ("silo-000", "silo-100")


def test_the_learning_rate_warms_up_then_decays_to_a_share_one_round_after_the_last() -> None:
    training = Training(learning_rate=1.0, warmup_rounds=5, decay_to=0.01)
    rates = [training.rate_at(round_, 200) for round_ in range(201)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[5:]))
    assert rates[199] > rates[200] == pytest.approx(0.01)
    assert Training(learning_rate=0.5, schedule="constant", warmup_rounds=0).rate_at(150, 200) == 0.5


def test_the_learning_rate_decays_linearly_or_in_steps() -> None:
    dcmh = Training(learning_rate=10**-1.5, schedule="linear", warmup_rounds=0, decay_to=10**-4.5)
    assert [dcmh.rate_at(at, 500) for at in (0, 250, 500)] == pytest.approx([10**-1.5, (10**-1.5 + 10**-6) / 2, 1e-6])
    warm = Training(learning_rate=1.0, schedule="linear", warmup_rounds=10, decay_to=0.5)
    assert [warm.rate_at(at, 20) for at in (4, 9, 10, 15, 25)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5])
    greedyhash = Training(learning_rate=1e-3, schedule="step", warmup_rounds=0)
    assert [greedyhash.rate_at(at, 100) for at in (0, 29, 30, 59, 60)] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5])
    halves = Training(learning_rate=1.0, schedule="step", warmup_rounds=2, step_rounds=3, step_factor=0.5)
    assert [halves.rate_at(at, 100) for at in (2, 4, 5, 8)] == pytest.approx([1.0, 1.0, 0.5, 0.25])


def test_every_scenario_of_the_repository_is_valid() -> None:
    import protocols

    for path in SCENARIOS:
        source = read(path)
        # Runs are named after their scenario, so the name may start with that of the paper's folder.
        assert source.scenario.name in (path.stem, f"{path.parent.name}-{path.stem}")
        resolve(source, protocols)


def test_a_short_run_has_a_short_warm_up_by_default(tiny: Path, tmp_path: Path) -> None:
    raw = read_yaml(tiny)
    raw["training"] = {key: value for key, value in raw["training"].items() if key != "warmup_rounds"}
    for rounds, warmup in ((1, 0), (3, 2), (5, 4), (6, 5), (200, 5)):
        scenario = scenarios.parse({**raw, "rounds": rounds}, tiny)
        assert scenario.training.warmup_rounds == warmup
        assert scenarios.parse(yaml.safe_load(scenario.dump()), tiny) == scenario
    with pytest.raises(InputError, match=r"training.warmup_rounds \(5\) must be below rounds \(3\)"):
        scenarios.parse({**raw, "rounds": 3, "training": {**raw["training"], "warmup_rounds": 5}}, tiny)


def test_errors_name_keys_and_lines_as_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    for text, place in (
        ("protocl: rcsr\n", "line 2: protocl"),
        ("protocol: rcsr\nfaults: [{kind: late}]\n", "line 3: faults.0.seconds"),
        (
            "protocol: rcsr\nfaults:\n  - {kind: late, seconds: 3}\n  - {kind: drop, silos: nobody}\n",
            "line 5: faults.1.silos",
        ),
        ("protocol: rcsr\nsilos:\n  count: true\n", "line 4: silos.count"),
        ("protocol: rcsr\n'a[b': 1\n", "line 3: a[b"),
        ("protocol: rcsr\n(str): 1\n", "line 3: (str)"),
    ):
        file.write_text("data: {name: openmoji}\n" + text + "name: mine\n")
        with pytest.raises(InputError) as caught:
            scenarios.load(file)
        assert caught.value.place == f"{file}: {place}"


# ------------------------------------------------------------------------------------------------------- reading YAML
PLAIN = [
    ("010", 10),
    ("0o10", 8),
    ("0x1F", 31),
    ("1_000", 1000),
    ("1:30", "1:30"),
    ("on", "on"),
    ("No", "No"),
    ("y", "y"),
    ("TRUE", True),
    ("2026-01-13", "2026-01-13"),
    ("1e-4", 1e-4),
    ("1E3", 1000.0),
    (".5", 0.5),
    ("-.inf", -math.inf),
    ("~", None),
    ("", None),
    ("'010'", "010"),
]


def test_plain_values_are_read_by_the_core_schema_of_yaml_1_2() -> None:
    for text, value in PLAIN:
        read = yaml_files.parse(f"a: {text}\n")["a"]
        assert (type(read), read) == (type(value), value), text


def test_values_that_contradict_their_tag_are_refused(tmp_path: Path) -> None:
    for text in ("!!int on", "!!float x", "!!bool 1", "!!int 1:30", "9" * 5000):
        (tmp_path / "x.yaml").write_text(f"rounds: {text}\n")
        with pytest.raises(InputError, match=r"x\.yaml"):
            yaml_files.read_yaml(tmp_path / "x.yaml")


printable = st.text(st.characters(exclude_categories=["C"]))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), printable,
    st.from_regex(r"[-+]?[0-9_:.eEox]{1,6}|on|Off|YES|no|y|null|~|<<|=", fullmatch=True),
)  # fmt: skip


@given(st.dictionaries(printable, st.lists(scalars), max_size=4))
def test_what_is_written_is_read_back(value: dict[str, object]) -> None:
    assert yaml_files.parse(yaml_files.dump(value)) == value


def bomb(levels: int) -> str:
    """A list of nine aliases to a list of nine aliases, and so on."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join([*lines, ""])


#: A mapping that merges nine times a mapping that merges nine times another, and so on.
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: &a {b: 1}\nc: [*a, *a]\nd: {<<: *a, e: 2}\n")
    assert yaml_files.read_yaml(tmp_path / "x.yaml")["d"] == {"b": 1, "e": 2}


def test_aliases_that_expand_without_bound_are_refused_by_every_reader(tmp_path: Path) -> None:
    path, mappings = tmp_path / "x.yaml", bomb(9).replace("[", "{k: [").replace("]", "]}")
    started = time.process_time()
    for text in (bomb(9), mappings, MERGES, "a: &a [*a]\n", "a: &a {b: *a}\n"):
        path.write_text(text)
        for reader in (yaml_files.read_yaml, scenarios.load, files.read_comparison, read_policy):
            with pytest.raises(InputError, match=r"x\.yaml: line \d+: found .*alias"):
                reader(path)
        with pytest.raises(InputError, match="--set"):
            scenarios.apply_settings({}, [f"name={{{', '.join(text.splitlines())}}}"])
    assert time.process_time() - started < 25


def test_a_missing_file_is_refused_with_the_kind_that_was_expected(tmp_path: Path) -> None:
    kinds: list[tuple[Callable[[Path], object], str]] = [
        (scenarios.load, "a scenario"), (files.read_comparison, "a scenario or comparison"),
        (files.read_search, "a tuning"), (read_policy, "a policy"), (read_site, "a site"),
    ]  # fmt: skip
    for reader, kind in kinds:
        with pytest.raises(InputError, match=rf"no such file', allowed: {kind} file \(YAML\)"):
            reader(tmp_path / "x.yaml")


def test_pipes_and_large_files_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        yaml_files.read_yaml(tmp_path / "pipe")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(InputError, match="at most 262,144 bytes"):
        yaml_files.read_yaml(tmp_path / "large.yaml")


def test_halves_of_a_character_are_refused_by_every_reader_and_pairs_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text('up: {fields: {delta: ["\\ud83d\\ude00"]}}\n')
    assert yaml_files.read_yaml(path) == {"up": {"fields": {"delta": ["\U0001f600"]}}}
    for half in ("\\ud83d", "\\ude00\\ud83d"):
        path.write_text(f'a: 1\nup: {{fields: {{delta: ["{half}"]}}}}\n')
        for reader in (yaml_files.read_yaml, scenarios.load, files.read_comparison, read_policy):
            with pytest.raises(InputError, match=r"x\.yaml: line 2: found 'half of a UTF-16 character"):
                reader(path)


# --------------------------------------------------------------------------------------------------------- site files
def written(folder: Path, text: str) -> Path:
    path = folder / "silo.yaml"
    path.write_text(text)
    return path


def test_paths_of_a_site_file_start_at_its_folder(tmp_path: Path) -> None:
    text = "data: {name: features, path: site0.npz}\nkeys: keys\ncache: cache\nout: run\npolicy: rules/policy.yaml\n"
    site = read_site(written(tmp_path, text))
    assert site.data is not None
    assert site.data.path == tmp_path / "site0.npz"
    assert (site.keys, site.cache, site.out) == (tmp_path / "keys", tmp_path / "cache", tmp_path / "run")
    assert site.policy == tmp_path / "rules" / "policy.yaml"


def test_a_mistake_in_a_site_file_is_named(tmp_path: Path) -> None:
    for text, place in (
        ("modalities: [sound]", ": line 1: modalities.0"),
        ("name: silo-00\ncolour: red", ": line 2: colour"),
        ("modalities: [image, image]", ": line 1: modalities"),
        ("name: x\nmodalities: [image, text\npolicy: x\n", ": line 2"),
        ("name: x\nkeys keys\nout: x\n", ": line 2"),
        ("file: other.yaml", ": line 1: file"),
        ("- data", ""),
    ):
        file = written(tmp_path, text)
        with pytest.raises(InputError) as caught:
            read_site(file)
        assert caught.value.place == f"{file}{place}", text


def test_a_silo_obeys_the_policy_of_its_site_file(tiny: Path, tmp_path: Path) -> None:
    init_keys(tmp_path / "keys", ("coordinator", "evaluator", *(f"silo-{number:02}" for number in range(4))))
    (tmp_path / "policy.yaml").write_text("up: {kinds: [nothing]}\n")
    site = written(tmp_path, "name: silo-00\nkeys: keys\nout: run\npolicy: policy.yaml\n")
    told = refused("silo", tiny, "--site", site)
    assert str(tmp_path / "policy.yaml") in told and "nothing" in told


def test_a_setting_that_fits_no_silo_names_its_line_in_the_site_file(tiny: Path, tmp_path: Path) -> None:
    init_keys(tmp_path / "keys", ("coordinator", "silo-00"))
    (tmp_path / "keys" / "coordinator.key").unlink()
    for line, words in (
        ("name: berlin", r"silo\.yaml: line 2: name: found 'berlin', allowed: silo-00 to silo-03"),
        ("name: silo-01", r"silo-01\.key: found 'no such file; this folder has the private key of silo-00'"),
        ("name: silo-00\ndevice: cuda:99", r"silo\.yaml: line 3: device: found 'cuda:99'"),
    ):
        site = written(tmp_path, f"keys: keys\n{line}\nout: run\n")
        assert re.search(words, refused("silo", tiny, "--site", site)), line


def test_a_method_with_public_items_is_refused_on_sites_own_data() -> None:
    own = {"name": "own", **COMMON, "partition": {"kind": "own"}, "protocol": {"name": "creamfl_public"}}
    with pytest.raises(InputError, match=r"creamfl_public.*with partition\.kind own the sites state none"):
        run_of(Scenario.model_validate(own))


def without_limit(schema: Any, place: str) -> Iterator[str]:
    """Places of the numbers in a JSON schema that have no upper limit."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number") and not {"maximum", "exclusiveMaximum", "enum"} & schema.keys():
            yield place
        for key, part in schema.items():
            yield from without_limit(part, f"{place}.{key}")
    elif isinstance(schema, list):
        for part in schema:
            yield from without_limit(part, place)


def test_every_number_has_an_upper_limit() -> None:
    schemas: list[Any] = [protocols.load(name).Options for name in protocols.names()]
    schemas += [protocols.loss(name).options for name in protocols.losses()]
    found = [*without_limit(Scenario.model_json_schema(), "scenario")]
    for schema in schemas:
        for name, hint in get_type_hints(schema, include_extras=True).items():
            if get_origin(hint) is not ClassVar:
                found += without_limit(TypeAdapter(hint).json_schema(), f"{schema.__name__}.{name}")
    assert not found


@pytest.mark.parametrize(
    "setting",
    [
        *(f"backbone.{key}=100000" for key in ("bottleneck", "dim")),
        *(f"objective={{base: dscmr, {key}: 100000}}" for key in ("bits", "hidden")),
        "protocol={name: rcsr, personal_hidden: 100000}",
        "protocol={name: fedhap, disc_hidden: 100000}",
        "protocol={name: fedrep, head_epochs: 100000}",
        "protocol={name: mfcpl, classes: 100000}",
        "training.local_epochs=100000",
        "faults=[{kind: drop, time: [0, 1.0e+300]}]",
        "cost.speed_sigma=50",
        "rounds=2000000",
    ],
)
def test_a_size_that_would_take_hours_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match="allowed: less than or equal to"):
        resolve(read(Path("smoke"), [setting]), protocols)
