"""JSON schemas of the files that a user writes, made from the models that read them.

Editors check a file while it is written. The models check more than a schema can say, e.g. that two keys fit together.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel

from fedmq.config.scenario import Scenario
from fedmq.config.site import Site
from fedmq.experiments.spec_file import KINDS, ComparisonFile
from fedmq.experiments.tune_file import TuneFile


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
