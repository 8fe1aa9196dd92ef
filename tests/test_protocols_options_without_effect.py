"""Options whose switch is off: those declared without effect have none, and setting one prints a hint."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import protocols
from fedmq.config.plug_ins import parsed, without_effect
from fedmq.config.scenario import Objective
from fedmq.errors import InputError
from protocols.parts import personal_adapter
from protocols.parts.personal_model import OWN
from tests.command_line import completed
from tests.in_process_jobs import run_jobs_here
from tests.small_federation import ADAPTERS, OBJECTIVES, population
from tests.threaded_run import resolved, run_of

METHODS = [name for name in protocols.names() if hasattr(protocols.load(name).Options, "OF")]


@dataclasses.dataclass(frozen=True)
class Typed:
    count: int = 1
    rate: float = 1.0


def test_a_value_that_equals_the_default_still_needs_its_type() -> None:
    assert type(parsed(Typed, {"rate": 1}, "x").rate) is float
    with pytest.raises(InputError, match=r"x\.count: found True"):
        parsed(Typed, {"count": True}, "x")


def choices(hint: Any) -> list[Any]:
    """The values that a type allows."""
    if hint is bool:
        return [False, True]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for each in get_args(hint) for value in choices(each)]


def another(kind: type[Any], name: str) -> Any:
    """A non-default value of an option."""
    default = {field.name: field.default for field in dataclasses.fields(kind)}[name]
    listed = [value for value in choices(get_type_hints(kind)[name]) if value != default]
    if listed:
        return listed[0]
    if default is None:
        return 0.1
    return default + 1 if isinstance(default, int) else default * 0.7 + 0.13


def off(kind: type[Any], condition: str) -> dict[str, Any]:
    """Values of a condition's switches for which it does not hold."""
    terms = [term.partition("=")[::2] for term in condition.split("|")]
    values: dict[str, Any] = {}
    for switch in dict.fromkeys(switch for switch, _ in terms):
        wanted = {value for each, value in terms if each == switch}
        listed = ["csq"] if switch == "objective.base" else choices(get_type_hints(kind)[switch]) or [0.0]
        nothing = [value for value in listed if value in (False, 0.0, "none")]
        values[switch] = next(value for value in [*nothing, *listed] if str(value).lower() not in wanted)
    return values


def cases() -> Iterator[tuple[str, str, list[str]]]:
    """Method, condition, and the options that have no effect where it does not hold."""
    for name in METHODS:
        kind = protocols.load(name).Options
        names = [field.name for field in dataclasses.fields(kind)]
        for condition, patterns in kind.OF.items():
            if name in ADAPTERS and condition == "objective.base=info_nce":
                continue  # it refuses every other base
            options = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
            assert all(options.values()), f"{name}: no option is called like one of {patterns}"
            yield name, condition, sorted({option for matched in options.values() for option in matched})


def trained(name: str, options: dict[str, Any], base: str | None) -> dict[str, torch.Tensor]:
    """The model and the silos' personal state used in evaluation, after four rounds."""
    objective = Objective(base="csq", bits=8, hidden=16) if base else OBJECTIVES.get(name)
    run = population(name, options, objective=objective)
    for _ in range(4):
        run.round()
    own = {
        f"{silo} {key}": kept[key]
        for silo, kept in run.personal.items()
        for key in (OWN, personal_adapter.STATE)
        if key in kept
    }
    return {"model": run.state.theta, **own}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "condition", "options"), list(cases()))
def test_options_whose_switch_is_off_have_no_effect_and_say_so(name: str, condition: str, options: list[str]) -> None:
    kind = protocols.load(name).Options
    settings = off(kind, condition)
    base = settings.pop("objective.base", None)
    changed = {**{option: another(kind, option) for option in options}, **settings}
    reasons = [
        {option: why for option, _, why in without_effect(kind(**given), {"objective.base": base or "info_nce"})}
        for given in (settings, changed)
    ]
    for option in set(options) - set(settings):
        assert option not in reasons[0]
        assert all(f"{switch}: {str(value).lower()}" in reasons[1][option] for switch, value in settings.items())
    with_them, without = trained(name, changed, base), trained(name, settings, base)
    assert with_them.keys() == without.keys()
    assert all(torch.equal(with_them[key], without[key]) for key in with_them)


def test_an_option_with_an_effect_prints_no_hint(tiny: Path) -> None:
    personal = "personal: fixed, personal_onset: 2, warmup: 1"
    assert run_of(resolved(tiny, f"protocol={{name: rcsr, {personal}, lambda_p: 0.4}}")).warnings == ()
    assert run_of(resolved(tiny, f"protocol={{name: rcsr, {personal}, s_norm: relative}}")).warnings == (
        "protocol.s_norm: relative has no effect with personal: fixed",
    )
    assert run_of(resolved(tiny, "protocol={name: rcsr, router: uniform, warmup: 3}")).warnings == (
        "protocol.warmup: 3 has no effect with router: uniform and anchor: true",
    )
    csq = "objective={base: csq, bits: 8, hidden: 16}"
    assert run_of(resolved(tiny, csq, "protocol={name: moon, tau: 0.05, mu: 0, buffer: 2}")).warnings == (
        "protocol.tau: 0.05 has no effect with objective.base: csq",
        "protocol.buffer: 2 has no effect with mu: 0.0",
    )


def test_a_part_of_a_method_that_begins_after_the_last_round_is_reported(tiny: Path) -> None:
    def warned(protocol: str, rounds: int) -> tuple[str, ...]:
        return run_of(resolved(tiny, f"protocol={protocol}", f"rounds={rounds}", "training.warmup_rounds=0")).warnings

    (line,) = warned("rcsr", 20)
    assert line == (
        "protocol.warmup: 20 (the default) with rounds: 20: the run ends before the start of the router and the "
        "clusters of prototypes; lower warmup or raise rounds"
    )
    assert warned("rcsr", 21) == warned("{name: rcsr, router: uniform}", 4) == ()
    assert [each.split(":")[0] for each in warned("{name: rcsr, warmup: 1, personal: fixed}", 50)] == [
        "protocol.personal_onset"
    ]
    assert warned("{name: fedbridge, personal: true}", 51) == ()
    assert len(warned("{name: fedbridge, personal: true}", 50)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", [("scenario",), ("sweep", "--vary", "protocol.lambda_p=0.4", "--seeds", "0")])
def test_the_command_line_prints_the_hint_once_and_runs(
    command: tuple[str, ...], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_jobs_here(monkeypatch)
    name, *options = command
    method = "protocol={name: rcsr, minimax: false, lambda_p: 0.4}"
    settings = ["--set", "rounds=1", "--set", "launcher=inline", "--set", method, "--quiet"]
    done = completed(name, tiny, "--out", tmp_path / "out", *settings, *options)
    assert done.returncode == 0
    line = "warning protocol.lambda_p: 0.4 has no effect with personal: none"
    assert done.stderr.splitlines().count(line) == 1


def test_a_fault_after_the_last_round_prints_a_hint(tiny: Path) -> None:
    late = "faults=[{kind: drop, rounds: 4-}, {kind: drop, rounds: [3, 9]}, {kind: late, seconds: 2.0, rounds: [7]}]"
    said = "has no effect with rounds: 4, as the last round is 3"
    assert run_of(resolved(tiny, "rounds=4", late)).warnings == (
        f"faults[0].rounds: 4- {said}",
        f"faults[2].rounds: 7 {said}",
    )
    assert run_of(resolved(tiny, "rounds=8", late)).warnings == ()
