"""Comparison files: what stands behind ``fedmq compare`` or ``fedmq sweep``, kept as YAML.

The keys are the options and mean the same; a file with ``compare`` or ``sweep`` in it is one, and no scenario has
either. What says how a comparison is carried out (``--out``, ``--jobs``, ...) stays on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedmq.config.loader import apply_settings, input_error, place_of, read_yaml
from fedmq.config.parts import Count
from fedmq.errors import InputError
from fedmq.experiments import grid

KINDS = ("compare", "sweep")
#: In place of a sweep's ``select``: what is varied is chosen from.
ON_VALIDATION = "val"


def _checked(parse: Callable[[str], object]) -> AfterValidator:
    """A text as an option takes it; the option's own parser says whether it is one."""

    def check(text: str) -> str:
        try:
            parse(text)
        except InputError as error:
            raise ValueError(error.allowed) from None
        return text

    return AfterValidator(check)


def _together(value: object) -> object:
    """A list of what an option separates by commas."""
    parts = value if isinstance(value, list) else [value]
    # A whole number is a number in YAML and a text to the option; True is no seed.
    plain = all(isinstance(part, str | int) and not isinstance(part, bool) for part in parts)
    return ",".join(map(str, parts)) if plain else value


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _selection(text: str) -> None:
    if text != ON_VALIDATION:
        grid.parse_variation(text, "--select")


_Vary = Annotated[str, _checked(partial(grid.parse_variation, option="--vary"))]
_Select = Annotated[str, _checked(_selection)]
_Setting = Annotated[str, _checked(lambda text: apply_settings({}, [text]))]
_Target = Annotated[str, _checked(grid.parse_target)]
_Repeated = BeforeValidator(_one_or_more)


class ComparisonFile(BaseModel):
    """A comparison file. Options that repeat are lists; every text is what stands behind its option."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    compare: Annotated[tuple[str, ...], _Repeated] = Field(
        (), min_length=1, description="scenarios, seen from this file's folder"
    )
    sweep: str | None = Field(None, description="the one scenario of fedmq sweep, likewise")
    settings: Annotated[tuple[_Setting, ...], _Repeated] = Field((), alias="set")
    vary: Annotated[tuple[_Vary, ...], _Repeated] = ()
    select: Annotated[tuple[_Select, ...], _Repeated] = ()
    select_seed: int | None = Field(None, ge=0, strict=True)
    select_rounds: Annotated[Count, Field(strict=True)] | None = None
    seeds: Annotated[str, _checked(grid.parse_seeds), BeforeValidator(_together)] | None = None
    metric: Annotated[str, _checked(grid.parse_metrics), BeforeValidator(_together)] | None = None
    baseline: str | None = None
    across: str | None = None
    target: Annotated[tuple[_Target, ...], _Repeated] = ()
    zero_shot: bool = False
    runs: Path | None = None

    @property
    def kind(self) -> str:
        """The command it is for."""
        return "sweep" if self.sweep is not None else "compare"

    @property
    def scenarios(self) -> tuple[str, ...]:
        """As they are written."""
        return self.compare if self.sweep is None else (self.sweep,)


KEYS = tuple(field.alias or name for name, field in ComparisonFile.model_fields.items())


def is_comparison(raw: Mapping[str, object]) -> bool:
    """Whether a YAML file is a comparison file rather than a scenario."""
    return any(kind in raw for kind in KINDS)


def read(path: Path) -> ComparisonFile | None:
    """Read a comparison file; None if the file is a scenario.

    Raises:
        InputError: it cannot be read, or a key or value in it is not allowed; one line names file, line and key.
    """
    raw = read_yaml(path)
    if not is_comparison(raw):
        return None
    if all(kind in raw for kind in KINDS):
        raise InputError(str(path), "both compare and sweep", "one of them")
    if unknown := [key for key in raw if key not in KEYS]:
        allowed = f"one of {', '.join(KEYS)}; how it is carried out (--out, --jobs, ...) stays on the command line"
        raise InputError(place_of(path, unknown), raw[unknown[0]], allowed)
    try:
        file = ComparisonFile.model_validate(raw)
    except ValidationError as error:
        named = input_error(error, path)
        raise InputError(named.place, error.errors()[0]["input"], named.allowed) from None
    if file.kind == "compare" and ON_VALIDATION in file.select:
        raise InputError(f"{path}: select", ON_VALIDATION, "with sweep; here key=value,value,...")
    for name in file.scenarios:
        scenario = path.parent / name
        if not scenario.is_file():
            raise InputError(f"{path}: {file.kind}", name, f"a scenario's file, seen from {path.parent}")
        if is_comparison(read_yaml(scenario)):
            raise InputError(f"{path}: {file.kind}", name, "a scenario; this is a comparison file itself")
    return file
