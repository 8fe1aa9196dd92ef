"""Schema of a site file, the YAML file with a site's own settings: its data, device, keys and addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from fedmq.config import plug_ins
from fedmq.config.resolve import DATA_PATHS, absolute
from fedmq.config.scenario import Data, Device, Scenario
from fedmq.config.sections import Modality, Name, Part
from fedmq.config.yaml_files import place_of, read_yaml, validated
from fedmq.errors import InputError

_ALLOWED = "a site file (YAML) with a key such as data; docs/howto/own_sites.md describes it"


class Site(Part):
    """A site: a silo, or the evaluator. Options on the command line override it."""

    name: Name | None = Field(None, description="the silo's name: silo-00, silo-01, ...")
    data: Data | None = Field(None, description="the site's data, as in a scenario; with partition.kind own")
    modalities: Annotated[tuple[Modality, ...], Field(min_length=1, max_length=2)] | None = Field(
        None, description="modalities of the data that the site uses: image, text or both; null: all it has"
    )
    device: Device | None = Field(None, description="auto, cpu, cuda or cuda:N; null: the scenario's")
    keys: Path | None = Field(None, description="folder with the site's private key and the coordinator's public key")
    cache: Path | None = Field(None, description="folder of extracted features and weights; null: $FEDMQ_CACHE")
    connect: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None, description="address of the coordinator"
    )
    out: Path | None = Field(
        None, description="folder in which each run has a folder of its own, for the message log and the personal state"
    )
    policy: Path | None = Field(None, description="policy file; the silo does not send what it forbids")
    file: Path | None = Field(None, exclude=True, description="set by fedmq: the site file itself")

    @field_validator("modalities")
    @classmethod
    def _once(cls, given: tuple[Modality, ...] | None) -> tuple[Modality, ...] | None:
        if given is not None and len(set(given)) != len(given):
            raise ValueError("each modality once")
        return given

    def place(self, key: str) -> str:
        """Place of a key such as ``data.path`` in the site file."""
        return key if self.file is None else place_in(self.file, key)

    def has(self, modality: Modality) -> bool:
        """Whether the site uses a modality, if its data have it."""
        return self.modalities is None or modality in self.modalities


def read_site(path: Path) -> Site:
    """Read a site file; relative paths in it start at its folder.

    Raises:
        InputError: it cannot be read, or a key or value is not allowed; the place names the file, line and key.
    """
    try:
        raw = read_yaml(path, "a site")
    except InputError as error:
        raise InputError(error.place, error.found, _ALLOWED) from None
    if "file" in raw:
        raise InputError(place_in(path, "file"), raw["file"], "no such key: fedmq sets it")
    site = validated(Site, raw, path)
    try:
        places = {key: getattr(site, key) for key in ("keys", "cache", "out", "policy")}
        changes: dict[str, object] = {
            key: _from(path, key, given) for key, given in places.items() if given is not None
        }
        if site.data is not None:
            inner = {key: getattr(site.data, key) for key in DATA_PATHS}
            data: dict[str, object] = {
                key: _from(path, f"data.{key}", given) for key, given in inner.items() if given is not None
            }
            if plug_ins.is_path(site.data.name):
                data["name"] = plug_ins.adopt(path.parent / Path(site.data.name).expanduser())
            changes["data"] = site.data.model_copy(update=data)
    except InputError as error:
        raise InputError(place_in(path, error.place), error.found, error.allowed) from None
    return site.model_copy(update={**changes, "file": path})


def is_site_file(path: Path) -> bool:
    """Whether a file is a site file rather than a scenario: it has keys that only a site file has, and no others."""
    try:
        keys = read_yaml(path).keys()
    except InputError:
        return False
    return keys <= Site.model_fields.keys() and not keys <= Scenario.model_fields.keys()


def place_in(path: Path, key: str) -> str:
    """Place in a site file of a key such as ``data.path``."""
    return place_of(path, key.split("."))


def _from(path: Path, key: str, given: Path) -> Path:
    return absolute(key, path.parent / given.expanduser())
