"""``fedmq data``: list data sets, check one, extract its frozen features, and find what two sites have."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from fedmq.cli.console import BAD_INPUT, DIFFERENT, bar, continued_by_repeating, out, starting
from fedmq.cli.options import AsJson, Device, File, Seed, Settings, SiteFile, check_fit
from fedmq.cli.scenarios import resolved_file
from fedmq.errors import InputError
from fedmq.storage.run_folder import open_run
from fedmq.text import counted, print_json, print_line, printable

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun
    from fedmq.config.scenario import Scenario
    from fedmq.data.overlap import Overlap
    from fedmq.launch.data_check import DataFacts, SiloData
    from fedmq.runs.data_records import AgreementRecord


FEW_LABELS, FEW_SILOS = 30, 12  # largest table of items by label and silo that is printed; JSON has all
SHOWN = 20  # names printed of each kind; JSON has all

data_app = typer.Typer(
    help="List, check and prepare data sets.\n\nExample: [bold]fedmq data check scenarios/smoke.yaml[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


_LEAST_KEY = 32  # characters of a shared secret, which must not be guessed


@data_app.command("list")
def data_list(
    names: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Your own Python files, also listed.", show_default=False),
    ] = None,
) -> None:
    """List the data sets that a scenario can name, and those in your own Python files.

    Example: [bold]fedmq data list[/bold]
    """
    from fedmq.config import plug_ins  # noqa: PLC0415
    from fedmq.data import catalogue  # noqa: PLC0415

    given = {file.name: plug_ins.adopt(file.expanduser()) for file in names or ()}
    known = given | {name: name for name in catalogue.REGISTRY.names()}
    table = Table("data.name", "what it is")
    for name, summary in [(shown, catalogue.find(name).summary) for shown, name in known.items()]:
        table.add_row(name, summary)
    for name, summary in catalogue.OTHERS.items():
        table.add_row(name, summary)
    out.print(table)
    out.print("docs/reference/data_sets.md has the file layout of each")


@data_app.command("digest")
def data_digest(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or its scenario (YAML).", show_default=False)
    ],
    site: Annotated[
        Path | None, typer.Option("--site", metavar="FILE", help="The site file, where each site has its own data.")
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Compute the salted digest that processes state about their data, and compare it with what they stated in a run.

    With a scenario in place of a run, print what processes have to state; with --json, in the form of agreement.json.

    Exit code 3 if no process of the run stated these data.

    Example: [bold]fedmq data digest scenarios/smoke.yaml --json[/bold]

    Example: [bold]fedmq data digest runs/own --site silo.yaml[/bold]
    """
    from fedmq.runs.data_records import AgreementRecord  # noqa: PLC0415
    from fedmq.storage.json_files import read_json  # noqa: PLC0415

    folder = open_run(run) if run.is_dir() else None
    file = run if folder is None else folder.scenario
    resolved = resolved_file(file, settings, seed, manual=site is not None, adopt=folder is None)
    record = _to_state(resolved, site)
    if as_json:
        print_json(record.plain())
        return
    digest = next(iter(record.stated.values())).data_digest
    if folder is None:
        print_line(f"{digest}  {resolved.id}")
        return
    before = read_json(folder.agreement, AgreementRecord, "what the processes of a run stated about their data")
    names = [name for name, stated in sorted(before.stated.items()) if stated.data_digest == digest]
    print_line(f"{digest}  {', '.join(names) or 'stated by no process of this run'}")
    if not names:
        sys.exit(DIFFERENT)


def _to_state(resolved: ResolvedRun, site: Path | None) -> AgreementRecord:
    """What the processes of a run, or the silo of a site, have to state about their data."""
    from fedmq.config.site import read_site  # noqa: PLC0415
    from fedmq.federation.participant import SiteData  # noqa: PLC0415
    from fedmq.runs.data_records import AgreementRecord  # noqa: PLC0415

    scenario = resolved.scenario
    if scenario.data is None:
        if site is None:
            raise InputError("--site", "not given", "a site file, as each site of this scenario has its own data")
        here = read_site(site)
        held = SiteData.load(scenario, here, resolved.id)
        return AgreementRecord.of(resolved.id, {here.name or "site": held.statement})
    if site is not None:
        raise InputError("--site", str(site), "no site file, as all processes of this scenario have the same data")
    from fedmq.data.item_digests import item_digests  # noqa: PLC0415
    from fedmq.federation.population import build_population  # noqa: PLC0415

    population = build_population(scenario, pooled=resolved.pooled)
    stated = population.statements(item_digests(population.prepared, scenario.dataset), resolved.id)
    return AgreementRecord.of(resolved.id, {name: (statement, None) for name, statement in stated.items()})


@data_app.command("check")
def data_check(
    file: File, site: SiteFile = None, settings: Settings = None, seed: Seed = None, as_json: AsJson = False
) -> None:
    """Count a scenario's data, report missing and unreadable files, and show each silo's dataset.

    With --site, the data of that site file, for a scenario whose sites have their own data.

    Exit code 2 if a run would refuse the data or the scenario.

    Example: [bold]fedmq data check scenarios/rcsr_mr50.yaml[/bold]

    Example: [bold]fedmq data check own.yaml --site silo.yaml[/bold]
    """
    facts = _checked(file, site, settings, seed)
    if as_json:
        print_json(facts.to_plain())
    else:
        show_data(facts)
    if not facts.usable:
        sys.exit(BAD_INPUT)


def show_data(facts: DataFacts) -> None:
    """Print the facts of a data set."""
    from fedmq.config.plug_ins import label  # noqa: PLC0415
    from fedmq.data.warnings import of_labels, sentences  # noqa: PLC0415

    splits = ", ".join(f"{count} {name}" for name, count in facts.splits.items() if count)
    line = f"{label(facts.data)}: {facts.items} items, {facts.captions} captions" + (splits and f" ({splits})")
    if facts.labels:
        line += f", {len(facts.labels)} labels, {facts.without_labels} items without one"
    print_line(line)
    if facts.split:
        print_line(printable(facts.split))
    if facts.example:
        print_line(printable(facts.example))
    for line in (*of_labels(facts.labels, facts.items), *facts.heldout_labels):
        print_line(printable(line))
    for kind, names in (
        ("missing", facts.missing),
        ("unreadable", facts.unreadable),
        ("without captions", facts.without_captions),
        ("without an image", facts.without_image),
        ("of nearly one colour", facts.constant),
        ("with several images in one file, of which only the first is read", facts.paged),
        ("duplicates of training items", facts.duplicates_of_training_items),
        ("items with the image of a training item", facts.duplicates_by_image),
        ("items of val and test whose image looks like that of a training item, as resized or mirrored", facts.alike),
        ("evaluated items that may be a crop or another version of one training image, by their vectors", facts.crops),
        *((f"ignored, {why}", names) for why, names in facts.ignored.items()),
    ):
        if names:
            _print_some(f"{len(names)} {kind}", names)
    for line in () if facts.warnings is None else sentences(facts.warnings, known=False):
        print_line(printable(line))
    if facts.published:
        usual = " and ".join(f"{count:,} {what}" for what, count in facts.published.items())
        line = f"papers on this data set use {usual}: some of its files may be missing"
        print_line(line)
    for problem in facts.problems:
        print_line(printable(problem))
    if facts.silos:
        _show_overlaps(facts.overlap or ())
        _show_silos(facts.silos, facts.labels)
    elif facts.silos is None and facts.usable:
        out.print("fedmq data features FILE extracts the features; then this command shows the data of each silo")


def _print_some(head: str, lines: Sequence[str]) -> None:
    """Print a head line, and below it the first lines."""
    rest = f" (the first {SHOWN}; --json has all)" if len(lines) > SHOWN else ""
    print_line("\n".join((f"{head}{rest}{':' if lines else ''}", *(f"  {printable(line)}" for line in lines[:SHOWN]))))


def _show_overlaps(found: Sequence[Overlap]) -> None:
    """Print the images and captions that two sites have, or two splits."""
    lines = []
    for each in found:
        counts = ((each.images, "image"), (each.captions, "caption"))
        shared = " and ".join(counted(count, what) for count, what in counts if count)
        spoiled = "; figures measured on these held-out items are too high" if each.spoils else ""
        lines.append(f"{' '.join(each.one)}, {' '.join(each.other)}: {shared}{spoiled}")
    _print_some(f"{counted(len(found), 'pair')} of splits of the silos with the same images or captions", lines)


def _show_silos(silos: Mapping[str, SiloData], labels: Collection[str]) -> None:
    """Print the data of each silo and, if the table is small enough, its items by label."""
    from fedmq.runs.results import ONE_STEP_TASKS, about_silos  # noqa: PLC0415

    columns = ("modalities", "samples", "steps per task", "held out", "JS divergence")
    table = Table(Column("silo", overflow="fold"), *columns)
    for name, silo in silos.items():
        alone = ((silo.image_only, "image only"), (silo.text_only, "text only"))
        kinds = ", ".join(f"{count} {kind}" for count, kind in alone if count)
        samples = f"{silo.samples} ({kinds})" if kinds else str(silo.samples)
        divergence = "-" if silo.label_divergence is None else f"{silo.label_divergence:.3f}"
        facts = (samples, str(silo.steps), str(silo.heldout), divergence)
        table.add_row(escape(name), " + ".join(silo.modalities), *facts)
    out.print(table)
    print_line(about_silos([(silo.samples, silo.steps, silo.label_divergence) for silo in silos.values()]))
    if {silo.steps for silo in silos.values() if silo.samples} == {1}:
        print_line(ONE_STEP_TASKS)
    if labels and len(labels) <= FEW_LABELS and len(silos) <= FEW_SILOS:
        heads = ("label", *(escape(name.removeprefix("silo-")) for name in silos))
        table = Table(*(Column(head, overflow="fold") for head in heads))
        for name in labels:
            table.add_row(escape(name), *(str(silo.labels[name]) for silo in silos.values()))
        out.print("training items of each label", table, sep="\n")


@data_app.command("features")
def data_features(
    file: File, device: Device = None, settings: Settings = None, seed: Seed = None, as_json: AsJson = False
) -> None:
    """Extract a scenario's frozen features into the cache; repeat the command to continue after an interruption.

    Example: [bold]fedmq data features scenarios/fedcafe/mirflickr.yaml --device cuda:0[/bold]
    """
    scenario = resolved_file(file, settings, seed).scenario
    with continued_by_repeating():
        _extract(scenario, device, as_json=as_json)


@data_app.command("fingerprint")
def data_fingerprint(
    site: Annotated[Path, typer.Argument(metavar="SITE", help="The site file (YAML).", show_default=False)],
    key: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="File with the secret that the sites share, in one line.")
    ],
    out_file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The file to send; NAME.overlap.json by default.")
    ] = None,
) -> None:
    """Write keyed digests of a site's images and captions, for a comparison with those of other sites.

    A second file, with the ending .names, names an item for each digest and stays at the site. docs/howto/overlap.md
    says what the digests reveal.

    Example: [bold]fedmq data fingerprint silo.yaml --key overlap.key[/bold]
    """
    from fedmq.config.site import read_site  # noqa: PLC0415 - --help does without
    from fedmq.data.overlap import digests_of  # noqa: PLC0415
    from fedmq.storage.run_folder import write_json  # noqa: PLC0415
    from fedmq.wire.keys import passphrase_in  # noqa: PLC0415

    here, secret = read_site(site), passphrase_in(key)
    if here.data is None or here.name is None:
        raise InputError(here.place("data" if here.data is None else "name"), "nothing", "the site's data and name")
    if len(secret) < _LEAST_KEY:
        allowed = f"at least {_LEAST_KEY}, e.g. from `openssl rand -hex 32`"
        raise InputError(str(key), f"a secret of {len(secret)} characters", allowed)
    with continued_by_repeating():
        image, text = here.has("image"), here.has("text")
        made, names = digests_of(here.data, here.name, secret, image=image, text=text, progress=bar())
    path = out_file or Path(f"{here.name}.overlap.json")
    write_json(path, made.plain())
    write_json(path.with_suffix(".names"), names)
    for split, each in made.splits.items():
        print_line(f"{split}: {counted(len(each.images), 'image')}, {counted(len(each.captions), 'caption')}")
    print_line(f"{path}: send this file to the one who compares; {path.with_suffix('.names')} stays here")


@data_app.command("overlap")
def data_overlap(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="A file of each site.", show_default=False)],
    names: Annotated[
        Path | None, typer.Option("--names", metavar="FILE", help="Also list the shared items of this file's site.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the images and captions that two sites have, or one site's training and another's held-out items.

    Example: [bold]fedmq data overlap silo-00.overlap.json silo-01.overlap.json[/bold]
    """
    from dataclasses import asdict  # noqa: PLC0415

    from fedmq.data.overlap import OverlapFile, OverlapNames, joined, overlaps, shared_items  # noqa: PLC0415
    from fedmq.storage.json_files import read_json  # noqa: PLC0415

    read = [(str(path), read_json(path, OverlapFile, "a file of fedmq data fingerprint")) for path in files]
    held = joined(read)
    found = overlaps(held)
    items = [] if names is None else shared_items(held, read_json(names, OverlapNames, "a file of names").root)
    if as_json:
        print_json({"overlap": [asdict(each) for each in found], "items": items})
        return
    _show_overlaps(found)
    if items:
        _print_some(f"{counted(len(items), 'item')} of {names} with shared contents", items)


def _checked(file: Path, site: Path | None, settings: list[str] | None, seed: int | None) -> DataFacts:
    """Check the data of a scenario, or of a site file."""
    from fedmq.config.site import is_site_file, read_site  # noqa: PLC0415 - --help does without

    if is_site_file(file):
        command = f"the run's scenario, and this file as --site: fedmq data check SCENARIO --site {file}"
        raise InputError(str(file), "a site file", command)
    starting()
    run = resolved_file(file, settings, seed, manual=site is not None)
    from fedmq.launch import data_check  # noqa: PLC0415
    from fedmq.storage.cache import use_cache  # noqa: PLC0415

    if site is not None:
        here = read_site(site)
        check_fit(run, here)
        use_cache(here.cache)
        return data_check.check_site(run.scenario, here, bar())
    if run.scenario.data is None:
        command = f"the site file with the data, as in fedmq data check {file} --site silo.yaml"
        raise InputError(str(file), "partition.kind own, where each site has its own data", command)
    return data_check.check(run, bar())


def _extract(scenario: Scenario, device: str | None, *, as_json: bool) -> None:
    """Extract a scenario's frozen features on a device, by default the scenario's, and print their shapes."""
    from fedmq.data.prepare import prepare, text_features  # noqa: PLC0415
    from fedmq.data.warnings import sentences  # noqa: PLC0415
    from fedmq.federation.population import device_of  # noqa: PLC0415

    place = device_of(device or scenario.device)
    prepared = prepare(scenario.dataset, scenario.backbone, None, scenario.seed, bar(), place)
    if scenario.partition.kind == "dir_clusters" and prepared.meta.text_dtype != "float32":
        # The partition needs float32 text features, which data prepared for adapters in the blocks do not contain.
        text_features(prepared, scenario.backbone, scenario.seed, None, bar(), place)
    facts = {name: getattr(prepared.meta, name) for name in ("n", "image_shape", "text_shape", "captions", "digest")}
    if as_json:
        print_json({**facts, "warnings": prepared.meta.warnings.plain(), "folder": str(prepared.folder)})
    else:
        shapes = f"image {facts['image_shape']}, text {facts['text_shape']}, up to {facts['captions']} texts per item"
        print_line(f"{facts['n']} items: {shapes}, in")
        print_line(str(prepared.folder))
        for line in sentences(prepared.meta.warnings):
            print_line(printable(line))
