"""``fedmq data``: list data sets, check one, and extract its frozen features."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedmq.cli.console import out, starting
from fedmq.cli.options import AsJson, Bar, Device, File, Seed, Settings
from fedmq.cli.scenarios import resolved_file
from fedmq.text import printable

if TYPE_CHECKING:
    from fedmq.config.scenario import Scenario
    from fedmq.federation.data_check import Fits


def data_list(
    names: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Python files of your own, also listed.", show_default=False),
    ] = None,
) -> None:
    """List the data sets that a scenario can name, and data sets in Python files of your own.

    Example: [bold]fedmq data list[/bold]
    """
    from fedmq.config import user_files  # noqa: PLC0415
    from fedmq.data import catalogue  # noqa: PLC0415

    given = {file.name: user_files.adopt(file.expanduser()) for file in names or ()}
    known = given | {name: name for name in catalogue.REGISTRY.names()}
    table = Table("data.name", "what it is")
    for name, summary in [(shown, catalogue.find(name).summary) for shown, name in known.items()]:
        table.add_row(name, summary)
    for name, summary in catalogue.OTHERS.items():
        table.add_row(name, summary)
    out.print(table)
    out.print("docs/reference/data_sets.md has the file layout of each", highlight=False)


def add_data(
    app: typer.Typer,
    bar: Bar,
    bad_input: int,
    fits: Fits,
) -> None:
    """Add the commands of ``fedmq data``.

    Args:
        app: the command group.
        bar: makes a progress line.
        bad_input: exit code if a run would refuse the data.
        fits: refuses a scenario that cannot run on the prepared data in a folder.
    """
    app.command("list")(data_list)

    @app.command("check")
    def data_check(file: File, settings: Settings = None, seed: Seed = None, as_json: AsJson = False) -> None:
        """Count a scenario's data, report missing and unreadable files, and show each silo's dataset.

        Exit code 2 if a run would refuse the data or the scenario.

        Example: [bold]fedmq data check scenarios/rcsr_mr50.yaml[/bold]
        """
        starting()
        from fedmq.federation import data_check  # noqa: PLC0415

        facts = data_check.check(resolved_file(file, settings, seed).scenario, fits, bar())
        if as_json:
            print(json.dumps(facts.to_plain(), indent=2))
        else:
            data_check.show(facts, out)
        if not facts.usable:
            sys.exit(bad_input)

    @app.command("features")
    def data_features(
        file: File, device: Device = None, settings: Settings = None, seed: Seed = None, as_json: AsJson = False
    ) -> None:
        """Extract a scenario's frozen features into the cache; repeat the command to continue after an interruption.

        Example: [bold]fedmq data features scenarios/fedcafe/mirflickr.yaml --device cuda:0[/bold]
        """
        _extract(resolved_file(file, settings, seed).scenario, device, bar, as_json=as_json)


def _extract(scenario: Scenario, device: str | None, bar: Bar, *, as_json: bool) -> None:
    """Extract a scenario's frozen features on a device, by default the scenario's, and print their shapes."""
    from fedmq.data.prepare import prepare, text_features  # noqa: PLC0415
    from fedmq.data.remarks import sentences  # noqa: PLC0415
    from fedmq.federation.population import device_of  # noqa: PLC0415

    place = device_of(device or scenario.device)
    found = prepare(scenario.dealt, scenario.backbone, None, scenario.seed, bar(), place)
    if scenario.partition.kind == "dir_clusters" and found.meta.text_dtype != "float32":
        # The partition needs float32 text features, which data prepared for adapters in the blocks do not contain.
        text_features(found, scenario.backbone, scenario.seed, None, bar(), place)
    facts = {name: getattr(found.meta, name) for name in ("n", "image_shape", "text_shape", "captions", "digest")}
    if as_json:
        print(json.dumps({**facts, "remarks": found.meta.remarks.plain(), "folder": str(found.folder)}, indent=2))
    else:
        shapes = f"image {facts['image_shape']}, text {facts['text_shape']}, up to {facts['captions']} texts per item"
        out.print(f"{facts['n']} items: {shapes}, in {found.folder}", highlight=False, soft_wrap=True, markup=False)
        for line in sentences(found.meta.remarks):
            out.print(printable(line), highlight=False, soft_wrap=True, markup=False)
