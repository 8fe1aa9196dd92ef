"""A run's results in Python: its summary, its curves, its message logs, its report and its model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmq.config.resolve import load as read_scenario
from fedmq.errors import InputError
from fedmq.evaluation.metrics import shown
from fedmq.runs.report import run_report
from fedmq.runs.report.logs import read_logs
from fedmq.runs.results import gallery_of, meaningful, read_metrics, read_summary
from fedmq.runs.run_records import EvaluationLine, MergeLine, RunSummary
from fedmq.storage.run_folder import RunFolder
from fedmq.storage.run_folder import open_run as open_folder
from fedmq.wire.log_records import (
    HandshakeRecord,
    MessageRecord,
    NoteRecord,
    RefusedRecord,
    TimelineRecord,
    read_records,
)

if TYPE_CHECKING:
    import pandas as pd

    from fedmq.api.model import Model
    from fedmq.text import Progress


class Run:
    """A run folder.

    Args:
        folder: the run folder.

    Raises:
        InputError: it is not a run folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._files: RunFolder = open_folder(Path(folder))

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._files.root

    @property
    def finished(self) -> bool:
        """Whether the run is finished; if not, :func:`fedmq.resume` continues it."""
        return self._files.summary.is_file()

    @cached_property
    def summary(self) -> RunSummary:
        """``summary.json``: ``summary.metrics["mean_r1"]``, ``summary.per_silo["silo-00"]``, ...

        Raises:
            InputError: the run is not finished.
        """
        return read_summary(self._files)

    @property
    def metrics(self) -> pd.DataFrame:
        """Metrics of the shared model: a row for each evaluated version, a column for each metric."""
        import pandas as pd  # noqa: PLC0415 - only data frames need it

        lines = [line for line in read_metrics(self._files) if isinstance(line, EvaluationLine)]
        frame = pd.DataFrame([line.metrics for line in lines], index=[line.version for line in lines])
        return frame.rename_axis(index="version")

    @property
    def merges(self) -> pd.DataFrame:
        """A row for each merge: the run's time [s], replies, their mean staleness, loss, and the method's values."""
        import pandas as pd  # noqa: PLC0415

        lines = [line for line in read_metrics(self._files) if isinstance(line, MergeLine)]
        rows = [
            {
                "time_s": line.now,
                "replies": len(line.replies),
                "mean_staleness": sum(line.staleness) / len(line.staleness) if line.staleness else 0.0,
                "loss": line.loss,
                **line.reported,
            }
            for line in lines
        ]
        return pd.DataFrame(rows, index=[line.version for line in lines]).rename_axis(index="version")

    @property
    def per_silo(self) -> pd.DataFrame:
        """A row for each silo: modalities, training items, merged replies, and metrics on its part of the split.

        Raises:
            InputError: the run is not finished.
        """
        import pandas as pd  # noqa: PLC0415

        rows = {
            name: {
                "modalities": "+".join(silo.modalities),
                "samples": silo.samples,
                "participations": silo.participations,
                **silo.figures,
            }
            for name, silo in self.summary.per_silo.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="silo")

    @property
    def messages(self) -> pd.DataFrame:
        """The message logs of all processes, a row for each record, in the order of each log.

        Columns: ``process``, ``n``, ``wall`` (UTC), ``action`` (sent, received, refused, note), ``kind``, ``peer``,
        ``bytes``, ``payloads`` (kinds, joined by a comma), ``round_version`` (base version of a task or reply), and
        ``text`` (of a note or a refusal).

        Raises:
            InputError: a log is damaged.
        """
        import pandas as pd  # noqa: PLC0415

        rows = [row for path in sorted((self.folder / "messages").glob("*.jsonl")) for row in _records(path)]
        frame = pd.DataFrame(
            rows,
            columns=["process", "n", "wall", "action", "kind", "peer", "bytes", "payloads", "base_version", "text"],
        )
        frame["wall"] = pd.to_datetime(frame["wall"])
        return frame

    def report(self) -> Path:
        """Write ``report.html`` again and return its path.

        Raises:
            InputError: the run is not finished, or a log is damaged.
        """
        write_report(self._files, damaged=False)
        return self._files.report

    def model(
        self, *, device: str | None = None, silo: str | None = None, site: str | os.PathLike[str] | None = None
    ) -> Model:
        """The released model, or a silo's personal model; see :func:`fedmq.load`.

        Raises:
            InputError: the run is not finished, or it has no such model.
        """
        from fedmq.api.model import load  # noqa: PLC0415 - imports torch

        if not self.finished:
            raise InputError(str(self.folder), "an unfinished run", "a finished run; fedmq.resume continues it")
        return load(self.folder, device=device, silo=silo, site=site)

    def __repr__(self) -> str:
        return f"<fedmq run {self.folder}: {self._headline()}>"

    def _repr_html_(self) -> str:
        if not self.finished:
            return f"<pre>{escape(repr(self))}</pre>"
        metrics = meaningful(self.summary.metrics, gallery_of(self.summary))
        rows = "".join(
            f"<tr><td>{escape(metric.title)}</td><td>{metrics[metric.name]:.4f}</td></tr>" for metric in shown(metrics)
        )
        caption = f"{escape(self.summary.scenario)}: {escape(self.summary.method)}, seed {self.summary.seed}"
        return f"<table><caption>{caption}</caption>{rows}</table><p>{escape(str(self.folder))}</p>"

    def _headline(self) -> str:
        if not self.finished:
            return f"not finished, {len(self.merges)} merges"
        summary = self.summary
        known = [name for name in ("mean_r1", "map") if name in summary.metrics]
        values = ", ".join(f"{name} {summary.metrics[name]:.4f}" for name in known)
        return f"{summary.method}, {summary.versions} rounds, {values}"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for record, _ in read_records(path, damaged=False):
        row: dict[str, Any] = {"process": record.process, "n": record.n, "wall": record.wall, "action": record.action}
        match record:
            case MessageRecord():
                header = record.header
                payloads = ",".join(kind for kind, _ in record.payloads)
                peer = header.receiver if record.action == "sent" else header.sender
                row |= {"kind": str(header.kind), "peer": peer, "bytes": record.bytes, "payloads": payloads}
                row["base_version"] = header.base_version
            case HandshakeRecord():
                row |= {"kind": str(record.kind), "peer": record.peer, "bytes": record.bytes}
            case RefusedRecord():
                row |= {"peer": record.peer, "bytes": record.bytes, "text": f"{record.reason}: {record.detail}"}
            case TimelineRecord():
                row |= {
                    "kind": "timeline",
                    "peer": record.silo,
                    "text": str(record.event),
                    "base_version": record.version,
                }
            case NoteRecord():
                row |= {"kind": "note", "text": str(record.event), "base_version": record.version}
        yield row


def write_report(folder: RunFolder, progress: Progress | None = None, *, damaged: bool = True) -> str | None:
    """Write a run's report with examples, the shared space and the silos' holdings if the data are available.

    ``damaged`` leaves out lines of message logs that are not records; otherwise they are refused.

    Returns:
        Why they are missing from the report; None if it has them.

    Raises:
        InputError: the run is not finished, its files are invalid, or a log is damaged where that is refused.
    """
    import protocols  # noqa: PLC0415 - registers the objectives
    from fedmq.retrieval import report_data  # noqa: PLC0415 - imports torch
    from fedmq.retrieval.released_model import open_release  # noqa: PLC0415

    read_summary(folder)  # before the logs, which may be long
    logged, reason = read_logs(folder, progress, damaged=damaged), None
    try:
        release = open_release(folder.root, "auto")
        if release.scenario.data is None:
            reason = "only the sites have data; fedmq search RUN --gallery shows what the model finds"
        else:
            report_data.write(release, progress)
    except InputError as error:
        reason = str(error)
    run_report.write(folder, protocols.reported(read_scenario(folder.scenario).protocol.name), logged)
    return reason


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Open a run folder, e.g. of ``fedmq scenario``.

    Raises:
        InputError: it is not a run folder.
    """
    return Run(folder)
