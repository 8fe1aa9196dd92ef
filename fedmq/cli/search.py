"""``fedmq search``, ``export``, ``curves`` and ``tsne``: retrieval and evaluation with released models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Column, Table

from fedmq.cli.console import bar, out, say, writes_unicode
from fedmq.cli.options import AsJson, Device, Run, refuse_options
from fedmq.errors import InputError
from fedmq.storage.run_folder import make_folder, require_folder, write_text
from fedmq.text import print_json, print_line, printable

if TYPE_CHECKING:
    from fedmq.retrieval.plots import Runs
    from fedmq.retrieval.released_model import ModelFolder, Release
    from fedmq.retrieval.search import Hit, SearchHits

#: Shows progress: what, done, total.
Show = Callable[[str, int, int], None]


#: Maximum number of silos whose columns the terminal shows.
_MOST_COLUMNS = 10
#: Modality of an item.
Side = Literal["image", "text"]
Text = Annotated[str | None, typer.Argument(metavar="TEXT", help="Text to search for.", show_default=False)]
Chosen = Annotated[
    Path | None,
    typer.Option(
        "--gallery",
        metavar="FILE|DIR",
        help="Gallery: a folder of images, or a scenario, site file or features file for its data; by default the "
        "run's data set.",
    ),
]
Finished = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="Folders of finished runs, or of comparisons, for all their rows.", show_default=False
    ),
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--silo",
        metavar="NAME",
        help="Use this silo's personal model, for methods that have them; by default the shared model.",
        show_default=False,
    ),
]


AtSite = Annotated[
    Path | None,
    typer.Option(
        "--site",
        metavar="FILE",
        help="Use the personal model of this site's silo and the site's data, for a run on sites' own data.",
        show_default=False,
    ),
]


def _released(
    folder: Path, device: str | None, silo: str | None, site: Path | None, show: Show
) -> Release | ModelFolder:
    """A run, or the folder of a model without its run."""
    import protocols  # noqa: F401, PLC0415 - registers the objectives
    from fedmq.launch.released_runs import open_run_model  # noqa: PLC0415
    from fedmq.retrieval.released_model import open_model  # noqa: PLC0415
    from fedmq.runs.release import is_model  # noqa: PLC0415

    if site is not None:
        _adopt_site(site)
    if not is_model(folder):
        return open_run_model(folder, device, silo, show, site)
    for option, given in (("--silo", silo), ("--site", site)):
        if given is not None:
            raise InputError(option, str(given), f"no {option}: personal models need the run folder, RUN")
    return open_model(folder, device)


def _adopt_site(file: Path) -> str | None:
    """Use the cache that a site file names; returns the name of its silo, if it has one."""
    from fedmq.config.site import read_site  # noqa: PLC0415
    from fedmq.storage.cache import use_cache  # noqa: PLC0415

    site = read_site(file)
    use_cache(site.cache)
    return site.name


def _finished_runs(runs: Sequence[Path], silo: str | None, site: Path | None) -> list[Runs]:
    """The runs of a plot, named after the silo if a personal model is used."""
    if site is not None and len(runs) > 1:
        raise InputError("--site", f"{len(runs)} runs", "one RUN, as the site's folder has the state of one run")
    for run in runs:
        require_folder(run)
    from fedmq.retrieval import plots  # noqa: PLC0415 - imports torch, which --help does not need

    name = None if site is None else _adopt_site(site)
    return plots.named(runs, silo or name)


def search_command(
    run: Run,
    text: Text = None,
    image: Annotated[Path | None, typer.Option("--image", metavar="FILE", help="Image to search for.")] = None,
    item: Annotated[
        str | None, typer.Option("--item", metavar="KEY", help="Item of the gallery to search for.")
    ] = None,
    side: Annotated[
        Side | None, typer.Option("--side", help="Modality of --item that is the query; by default its image.")
    ] = None,
    among: Annotated[
        Literal["images", "captions"] | None,
        typer.Option("--among", help="Modality to search; by default the one other than the query's."),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Number of results.")] = 10,
    chosen: Chosen = None,
    silo: OwnModel = None,
    site: AtSite = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Search a gallery with a released model: images by text, captions by image.

    RUN is the folder of a finished run, or of its model alone, which needs --gallery DIR. The first search encodes
    the gallery and keeps it in the model's folder; see [bold]fedmq export[/bold].

    Example: [bold]fedmq search runs/smoke "a dog in the snow"[/bold]

    Example: [bold]fedmq search model --gallery photos "a red fox"[/bold]

    Example: [bold]fedmq search runs/fedper "a dog in the snow" --silo silo-03[/bold]

    Example: [bold]fedmq search runs/own "a dog in the snow" --site silo.yaml[/bold]
    """
    require_folder(run)
    if image is not None:
        from fedmq.encoders.images import check_header  # noqa: PLC0415

        check_header(image)
    from fedmq.data.raw_set import whole  # noqa: PLC0415
    from fedmq.retrieval import search  # noqa: PLC0415 - the files of a gallery, which --help does not need

    for name, given in (("TEXT", text), ("--item", item)):
        whole(given or "", f"search: {name}")
    query = search.Query(text, image, item, side)
    result = None
    if (silo, site, device) == (None, None, None):
        result = search.find_again(run, query, chosen=chosen, among=among, top=top)
    if result is None:
        show = bar()
        model = _released(run, device, silo, site, show)
        result = search.find(model, query, chosen=chosen or site, among=among, top=top, progress=show)
    if as_json:
        _print_hits(result)
    else:
        out.print(hits_table(result.hits, binary=result.gallery.binary))


def _print_hits(result: SearchHits) -> None:
    """The results of a search as JSON."""
    measure = "distance" if result.gallery.binary else "cosine"
    facts = {"gallery": str(result.gallery.folder), "among": result.among, "measure": measure}
    results = [dataclasses.asdict(hit) for hit in result.hits]
    print_json({**facts, "results": results}, indent=None, ascii_only=not writes_unicode())


def hits_table(hits: Sequence[Hit], *, binary: bool) -> Table:
    """Results as a table; with distances of codes, or cosines."""
    captioned = ["caption"] if any(hit.caption for hit in hits) else []  # a folder of images has none
    table = Table("rank", "distance" if binary else "cosine", Column("item", overflow="fold"), *captioned)
    for hit in hits:
        score = f"{hit.score:.0f}" if binary else f"{hit.score:.3f}"
        cells = (str(hit.rank), score, escape(printable(hit.item)), escape(printable(hit.caption)))
        table.add_row(*cells[: 3 + len(captioned)])
    return table


def export_command(
    run: Run,
    chosen: Chosen = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", metavar="DIR", help="Write the model's towers to DIR instead of a gallery.")
    ] = None,
    hub: Annotated[
        Path | None,
        typer.Option("--hub", metavar="DIR", help="Write a folder for the Hugging Face Hub instead of a gallery."),
    ] = None,
    trec: Annotated[
        Path | None,
        typer.Option("--trec", metavar="DIR", help="Write the rankings of the evaluated items to DIR as TREC files."),
    ] = None,
    positives: Annotated[
        Path | None,
        typer.Option("--positives", metavar="FILE", help="With --trec: judgements (qrels) of further relevant items."),
    ] = None,
    top: Annotated[
        int | None, typer.Option("--top", min=10, help="With --trec: items per query, by default 100.")
    ] = None,
    silo: OwnModel = None,
    site: AtSite = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Encode a gallery with a released model, or export the model itself, to ONNX or for the Hugging Face Hub.

    RUN is the folder of a finished run, or of its model alone, which needs --gallery DIR. A gallery holds
    embeddings or packed hash codes (.npy).

    Example: [bold]fedmq export runs/smoke --gallery photos[/bold]

    Example: [bold]fedmq export runs/fedper --silo silo-03[/bold]

    Example: [bold]fedmq export runs/smoke --hub smoke --onnx smoke/onnx[/bold]

    Example: [bold]fedmq export runs/smoke --trec trec[/bold]
    """
    others = {"--gallery": chosen, "--trec": trec, "--silo": silo, "--site": site, "--device": device}
    if trec is None:
        refuse_options({"--positives": positives, "--top": top}, "only with --trec DIR")
    if onnx is not None or hub is not None:
        refuse_options(others, "no such option with --onnx or --hub")
        _export_model(_released(run, "cpu", None, None, bar()), onnx, hub, as_json=as_json)
        return
    show = bar()
    released = _released(run, device, silo, site, show)
    if trec is not None:
        refuse_options(
            {"--gallery": chosen}, "no such option with --trec, which ranks the items that the run evaluated"
        )
        _export_rankings(released, trec, positives, top or 100, show, as_json=as_json)
        return
    _export_gallery(released, chosen or site, show, as_json=as_json)


def _export_gallery(released: Release | ModelFolder, chosen: Path | None, show: Show, *, as_json: bool) -> None:
    from fedmq.retrieval import gallery as galleries  # noqa: PLC0415

    gallery = galleries.export(released, chosen, show)
    facts = {key: value for key, value in gallery.meta.plain().items() if key != "prepared"}
    files = sorted(path.name for path in gallery.folder.iterdir())
    if as_json:
        print_json({"folder": str(gallery.folder), "files": files, **facts}, indent=None)
        return
    size = f"codes of {facts['bits']} bits" if gallery.binary else f"embeddings of dimension {facts['dim']}"
    print_line(f"{gallery.folder}: {facts['items']} images, {facts['captions']} captions, {size}\n{', '.join(files)}")


def _export_rankings(
    released: Release | ModelFolder, folder: Path, positives: Path | None, top: int, show: Show, *, as_json: bool
) -> None:
    """Write TREC files, and print what they measure."""
    from fedmq.retrieval import rankings  # noqa: PLC0415
    from fedmq.retrieval.released_model import ModelFolder  # noqa: PLC0415

    if isinstance(released, ModelFolder):
        raise InputError("--trec", str(folder), "a run folder, RUN: a model alone has no evaluated items")
    found = rankings.ranked(released, top, show)
    if positives is not None:
        found = rankings.with_positives(found, positives)
    scores = {way: rankings.scores_of(ranking) for way, ranking in found.items()}
    files = [path.name for path in rankings.write(found, folder, released.run.root.resolve().name)]
    if as_json:
        print_json({"folder": str(folder), "files": files, "scores": scores}, indent=None)
        return
    table = Table("", *scores["i2t"])
    for way, values in scores.items():
        table.add_row(way, *(f"{value:.4f}" for value in values.values()))
    out.print(table)
    print_line(f"{folder}: {', '.join(files)}")


def _export_model(released: Release | ModelFolder, onnx: Path | None, hub: Path | None, *, as_json: bool) -> None:
    """Export the shared model; the folder for the Hub first, so that the ONNX files may lie in it."""
    from fedmq.retrieval import model_export  # noqa: PLC0415
    from fedmq.retrieval.released_model import Release  # noqa: PLC0415
    from fedmq.runs.release import onnx_contents  # noqa: PLC0415

    files = released.files if isinstance(released, Release) else released
    facts: dict[str, object] = {}
    if hub is not None:
        names = model_export.export_hub(files, hub)
        facts |= {"hub": str(hub), "files": list(names)}
    if onnx is not None:
        towers = model_export.export_onnx(files, onnx)
        contents = onnx_contents(files.config).replace("`", "")
        facts |= {"onnx": {tower.path.name: tower.difference for tower in towers}, "onnx_folder": str(onnx)}
        facts["onnx_contents"] = contents
    if as_json:
        print_json(facts, indent=None)
        return
    lines = [] if hub is None else [f"{hub}: {', '.join(names)}"]
    if onnx is not None:
        lines += [f"{tower.path}: differs from the model by at most {tower.difference:.1g}" for tower in towers]
        lines.append(contents)
    print_line("\n".join(lines))


def _models(rows: Sequence[Runs], opened: Callable[[Path], Release]) -> list[tuple[str, list[Release]]]:
    """The models of each row; rows of a comparison without such a model are left out, with a message."""
    models: list[tuple[str, list[Release]]] = []
    for row in rows:
        try:
            models.append((row.name, [opened(run) for run in row.folders]))
        except InputError as error:
            if row.comparison is None or (row is rows[-1] and not models):
                raise
            say("left out", f"{row.name}: {error}")
    return models


def curves_command(
    runs: Finished,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the results; by default curves/ in the first RUN."),
    ] = None,
    top: Annotated[
        str, typer.Option("--top", metavar="N,N,...", help="Cut-offs N of precision and recall at N.")
    ] = "1,5,10,20,50,100,200,500,1000",
    silo: OwnModel = None,
    site: AtSite = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Precision and recall of released models: over the ranking, by Hamming radius, and at N.

    Writes curves.csv and curves.html, with all runs in one plot of each kind; for the rows of a comparison, the
    means over seeds.

    Example: [bold]fedmq curves runs/fedhap runs/fedavg[/bold]

    Example: [bold]fedmq curves runs/fedcmr runs/fedscmr --silo silo-03[/bold]

    Example: [bold]fedmq curves runs/own --site silo.yaml[/bold]

    Example: [bold]fedmq curves runs/compare-fedavg-fedhap-0123456789ab[/bold]
    """
    found = _finished_runs(runs, silo, site)
    from fedmq.launch.released_runs import open_run_model  # noqa: PLC0415
    from fedmq.retrieval import plots  # noqa: PLC0415 - imports torch, which --help does not need

    cutoffs = plots.parse_cutoffs(top)
    show = bar()
    models = _models(found, lambda run: open_run_model(run, device, silo, show, site))
    folder = make_folder(out_dir or runs[0] / "curves")
    total, done = sum(len(releases) for _, releases in models), itertools.count(1)
    curves = []
    for name, releases in models:
        measured = []
        for release in releases:
            measured.append(plots.measured(release, cutoffs, show))
            show("runs measured", next(done), total)
        curves.append(plots.mean(name, measured))
    write_text(folder / "curves.csv", plots.curves_table(curves))
    write_text(folder / "curves.html", plots.curves_page(curves, ", ".join(run.name for run in curves)))
    if as_json:
        maps = {run.name: {f"map_{way}": curve.map for way, curve in run.ways.items()} for run in curves}
        print_json({"folder": str(folder), "runs": maps}, indent=None)
        return
    ways = list(dict.fromkeys(way for run in curves for way in run.ways))
    table = Table(Column("run", overflow="fold"), *(f"mAP {way}" for way in ways))
    for run in curves:
        cells = (f"{run.ways[way].map:.4f}" if way in run.ways else "-" for way in ways)
        table.add_row(escape(run.name), *cells)
    out.print(table)
    print_line(f"{folder}: curves.csv, curves.html")


def cross_command(
    run: Run,
    metric: Annotated[str, typer.Option("--metric", metavar="NAME", help="Metric to show.")] = "mean_r1",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the personal model of each silo on the held-out items of every silo.

    Rows are models, columns the silos whose items are the queries. For methods with personal models, in runs whose
    silos kept their state on this machine.

    Example: [bold]fedmq cross runs/local[/bold]
    """
    require_folder(run)
    from fedmq.launch.released_runs import open_run_model  # noqa: PLC0415
    from fedmq.retrieval.cross_site import measured  # noqa: PLC0415 - imports torch, which --help does not need
    from fedmq.retrieval.released_model import open_release  # noqa: PLC0415

    names = open_release(run, device).scenario.silo_names
    found = measured(names, lambda name: open_run_model(run, device, name), metric, bar())
    if as_json:
        facts = {"metric": metric, "models": found.models, "silos": found.silos, "items": found.items}
        means = {"own": found.own, "others": found.others, "without_model": found.without}
        print_json({**facts, "values": found.values.tolist(), **means}, indent=None)
        return
    shown = found.silos[:_MOST_COLUMNS]
    table = Table(f"{metric} of the model of", *shown, title="queries: held-out items of")
    for name, values in zip(found.models, found.values, strict=True):
        table.add_row(name, *(f"{value:.3f}" for value in values[: len(shown)]))
    table.add_row("items", *map(str, found.items[: len(shown)]))
    out.print(table)
    if len(shown) < len(found.silos):
        print_line(f"--json shows the other {len(found.silos) - len(shown)} columns, too")
    print_line(f"mean over models: on their own silo {found.own:.4f}, on other silos {found.others:.4f}")
    for name, why in found.without.items():
        say("left out", f"{name}: {why}")


def tsne_command(
    runs: Finished,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the results; by default tsne/ in the first RUN."),
    ] = None,
    items: Annotated[
        int, typer.Option("--items", min=1, help="Maximum number of items, sampled by the run's seed.")
    ] = 1000,
    classes: Annotated[int, typer.Option("--classes", min=1, help="Number of classes, the most frequent ones.")] = 10,
    side: Annotated[Side | None, typer.Option("--side", help="Only images or only texts; by default both.")] = None,
    silo: OwnModel = None,
    site: AtSite = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Plot codes or embeddings of released models in the plane (t-SNE), coloured by class.

    Writes tsne.csv and tsne.html with a plot per model of the evaluated items' images and first captions. For rows
    of a comparison, the first run is shown.

    Example: [bold]fedmq tsne runs/fedhap runs/fedavg --classes 6[/bold]

    Example: [bold]fedmq tsne runs/own --site silo.yaml[/bold]
    """
    first = [replace(row, folders=row.folders[:1]) for row in _finished_runs(runs, silo, site)]
    from fedmq.encoders.base import MODALITIES  # noqa: PLC0415
    from fedmq.launch.released_runs import open_run_model  # noqa: PLC0415
    from fedmq.retrieval import plots  # noqa: PLC0415 - imports torch, which --help does not need

    show, planes = bar(), []
    models = _models(first, lambda run: open_run_model(run, device, silo, show, site))
    folder = make_folder(out_dir or runs[0] / "tsne")
    sides = [modality for modality in MODALITIES if side in (None, modality)]
    for done, (name, (release,)) in enumerate(models):
        show("models placed", done, len(models))
        planes.append(plots.placed(name, release, items=items, classes=classes, sides=sides, progress=show))
    show("models placed", len(models), len(models))
    write_text(folder / "tsne.csv", plots.tsne_table(planes))
    write_text(folder / "tsne.html", plots.tsne_page(planes))
    if as_json:
        points = {plane.name: len(plane.items) for plane in planes}
        print_json({"folder": str(folder), "points": points}, indent=None)
        return
    print_line(f"{folder}: tsne.csv, tsne.html")
