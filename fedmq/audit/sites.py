"""Sites with ``partition.kind own`` whose data are available, each identified by the digest that it stated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedmq.config.resolve import ResolvedRun
from fedmq.config.site import Site, read_site
from fedmq.errors import InputError
from fedmq.federation.participant import SiteData
from fedmq.runs.data_records import AgreementRecord
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress
from fedmq.wire.messages import EVALUATOR

_DIGITS = 12  # of a digest in a message


def sites_of(
    run: ResolvedRun, folder: RunFolder, files: Sequence[Path], progress: Progress | None = None
) -> dict[str, Site]:
    """The sites of all processes of a run, by name, after checking that their data are those of the run.

    Args:
        run: the run.
        folder: its folder.
        files: a site file of each silo, and of the evaluator if the run has one.
        progress: called with (what, done, total) while data are read.

    Raises:
        InputError: a file's data are not what a process stated, or those of a process are missing.
    """
    record = read_json(folder.agreement, AgreementRecord, "what the sites of a run stated about their data")
    scenario, found = run.scenario, dict[str, Site]()
    needed = [*scenario.silo_names, *([EVALUATOR] if scenario.evaluator else [])]
    stated = {name: record.stated[name].data_digest for name in needed if name in record.stated}
    for file in files:
        site = read_site(file)
        content = SiteData.load(scenario, site, run.id, progress).content
        names = [name for name, digest in stated.items() if digest == content and name not in found]
        if site.name is not None:
            names = [name for name in names if name == site.name]
        if not names:
            wanted = stated.get(site.name or "")
            what = "what a site of the run stated" if wanted is None else f"what {site.name} stated: {wanted[:_DIGITS]}"
            allowed = f"the data as they were in the run, each site once; {what}"
            raise InputError(site.place("data"), f"data with digest {content[:_DIGITS]}", allowed)
        found[names[0]] = site
    missing = [name for name in stated if name not in found]
    if missing:
        allowed = "a site file with the data of each; fedmq data digest finds out whose data a file has"
        raise InputError("--site", f"no data of {', '.join(missing)}", allowed)
    return found
