"""Comparison files: the options of ``fedmq compare`` or ``fedmq sweep`` as YAML.

The keys are the options of the same names. A YAML file with the key ``compare`` or ``sweep`` is a comparison file; no
scenario has either. Options of execution (``--out``, ``--jobs``, ...) stay on the command line.

:func:`schema_of` makes JSON schemas of all kinds of files that a user writes, with which editors check them. The models
check more than a schema can say, e.g. that two keys fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedmq.config.resolve import apply_settings
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Count
from fedmq.config.site import Site
from fedmq.config.yaml_files import input_error, read_yaml
from fedmq.errors import InputError
from fedmq.experiments import grid
from fedmq.experiments.summary import parse_metrics, parse_target
from fedmq.experiments.tune_file import TuneFile
from fedmq.storage.regular_files import is_file

KINDS = ("compare", "sweep")
#: Value of a sweep's ``select``: the varied values are candidates, selected on the validation split.
ON_VALIDATION = "val"


def _checked(parse: Callable[[str], object]) -> AfterValidator:
    """Validate a text with the parser of its option."""

    def check(text: str) -> str:
        try:
            parse(text)
        except InputError as error:
            raise ValueError(error.allowed) from None
        return text

    return AfterValidator(check)


def _together(value: object) -> object:
    """Join a list into the comma-separated text that an option takes."""
    parts = value if isinstance(value, list) else [value]
    # YAML parses whole numbers, which the option takes as text; booleans are not whole numbers here.
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
_Target = Annotated[str, _checked(parse_target)]
_Repeated = BeforeValidator(_one_or_more, json_schema_input_type=str | tuple[str, ...])
_Listed = BeforeValidator(_together, json_schema_input_type=str | int | tuple[str | int, ...])


class ComparisonFile(BaseModel):
    """A comparison file. Repeatable options are lists; texts are in the form of their options."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    compare: Annotated[tuple[str, ...], _Repeated] = Field(
        (), min_length=1, description="scenarios, relative to this file's folder"
    )
    sweep: str | None = Field(None, description="scenario of fedmq sweep, likewise")
    settings: Annotated[tuple[_Setting, ...], _Repeated] = Field((), alias="set")
    vary: Annotated[tuple[_Vary, ...], _Repeated] = ()
    select: Annotated[tuple[_Select, ...], _Repeated] = ()
    select_seed: int | None = Field(None, ge=0, strict=True)
    select_rounds: Annotated[Count, Field(strict=True)] | None = None
    seeds: Annotated[str, _checked(grid.parse_seeds), _Listed] | None = None
    metric: Annotated[str, _checked(parse_metrics), _Listed] | None = None
    baseline: str | None = None
    across: str | None = None
    target: Annotated[tuple[_Target, ...], _Repeated] = ()
    zero_shot: bool = False
    runs: Path | None = None

    @property
    def kind(self) -> str:
        """The command to which it applies."""
        return "sweep" if self.sweep is not None else "compare"

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Scenario files as written."""
        return self.compare if self.sweep is None else (self.sweep,)


def is_comparison(raw: Mapping[str, object]) -> bool:
    """Whether a YAML file is a comparison file rather than a scenario."""
    return any(kind in raw for kind in KINDS)


def read(path: Path) -> ComparisonFile | None:
    """Read a comparison file; None if the file is a scenario.

    Raises:
        InputError: it cannot be read, or a key or value in it is not allowed; the error names file, line and key.
    """
    raw = read_yaml(path)
    if not is_comparison(raw):
        return None
    if all(kind in raw for kind in KINDS):
        raise InputError(str(path), "both compare and sweep", "one of them")
    try:
        file = ComparisonFile.model_validate(raw)
    except ValidationError as error:
        raise input_error(error, path, raw, ComparisonFile) from None
    if file.kind == "compare" and ON_VALIDATION in file.select:
        raise InputError(f"{path}: select", ON_VALIDATION, "with sweep; here key=value,value,...")
    for name in file.scenarios:
        scenario = path.parent / name
        if not is_file(scenario):
            raise InputError(f"{path}: {file.kind}", name, f"a scenario file, relative to {path.parent}")
        if is_comparison(read_yaml(scenario)):
            raise InputError(f"{path}: {file.kind}", name, "a scenario, not a comparison file")
    return file


# ------------------------------------------------------------------------------------------------- schemas for editors
class FileKind(StrEnum):
    """Kinds of files."""

    SCENARIO = "scenario"
    SITE = "site"
    COMPARISON = "comparison"
    TUNING = "tuning"


_MODELS: dict[FileKind, type[BaseModel]] = {
    FileKind.SCENARIO: Scenario,
    FileKind.SITE: Site,
    FileKind.COMPARISON: ComparisonFile,
    FileKind.TUNING: TuneFile,
}


def schema_of(kind: FileKind) -> dict[str, object]:
    """The JSON schema (draft 2020-12) of a kind of files."""
    schema = _MODELS[kind].model_json_schema(by_alias=True)
    if kind is FileKind.SITE:
        del schema["properties"]["file"]  # fedmq sets it
    if kind is FileKind.COMPARISON:
        schema["oneOf"] = [{"required": [command]} for command in KINDS]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"fedmq {kind} file"}
