"""Compare scenarios or methods from Python: ``fedmq compare`` in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmq.api.launch import settings_of
from fedmq.errors import InputError, RunError
from fedmq.text import print_line

if TYPE_CHECKING:
    import pandas as pd


#: Lines of the program that an error repeats if none names a reason.
_KEPT_LINES = 20


class Comparison:
    """The folder of a comparison.

    Args:
        folder: with ``table.csv``, ``runs.csv`` and ``plots.html``.

    Raises:
        InputError: it holds no comparison.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not (self.folder / "table.csv").is_file():
            raise InputError(str(folder), "no table.csv in it", "the folder of a finished comparison")

    @property
    def table(self) -> pd.DataFrame:
        """A row for each scenario or method: mean, spread, and paired difference to the baseline."""
        import pandas as pd  # noqa: PLC0415 - only data frames need it

        return pd.read_csv(self.folder / "table.csv")

    @property
    def runs(self) -> pd.DataFrame:
        """A row for each run."""
        import pandas as pd  # noqa: PLC0415

        return pd.read_csv(self.folder / "runs.csv")

    @property
    def plots(self) -> Path:
        """``plots.html``."""
        return self.folder / "plots.html"

    def __repr__(self) -> str:
        return f"<fedmq comparison {self.folder}: {len(self.table)} rows>"

    def _repr_html_(self) -> str:
        html: str = self.table.to_html(index=False, float_format="{:.4f}".format)
        return html


def compare(
    scenarios: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    vary: Mapping[str, Sequence[Any]] | None = None,
    metrics: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **keys: Any,
) -> Comparison:
    """Compare scenarios or methods on equal terms, over the same seeds.

    Finished runs are kept in the folder: the same call continues a comparison that was interrupted.

    >>> compare("scenarios/smoke.yaml", vary={"protocol": ["fedavg", "rcsr"]}, seeds=[0, 1])  # doctest: +SKIP

    Args:
        scenarios: scenario files, or one comparison file.
        seeds: seeds of the runs; each row runs with all of them.
        vary: values by scenario key; all combinations become rows.
        metrics: columns of the table, e.g. ``["mean_r1", "bytes.up"]``.
        out: folder of the results; ``runs/compare-<time>`` by default.
        progress: show the program's progress on standard error.
        **keys: scenario keys that override those of all files, as in :func:`fedmq.run`.

    Raises:
        RunError: an input was refused, or a run failed; the message holds what the program reported.
        KeyboardInterrupt: it was interrupted, after the processes have stopped.
    """
    files = [scenarios] if isinstance(scenarios, str | os.PathLike) else list(scenarios)
    folder = Path(out) if out is not None else Path("runs") / f"compare-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    command = [sys.executable, "-m", "fedmq", "compare", *map(str, files), "--out", str(folder)]
    command += ["--seeds", ",".join(map(str, seeds))]
    for key, values in (vary or {}).items():
        plain = [setting.partition("=")[2] for value in values for setting in settings_of({f".{key}": value})]
        command += ["--vary", f"{key}={','.join(plain)}"]
    if metrics is not None:
        command += ["--metric", ",".join(metrics)]
    command += [part for setting in settings_of(keys) for part in ("--set", setting)]
    # On a terminal the program itself draws its progress line there; elsewhere its lines are passed on and kept.
    errors = None if progress and sys.stderr.isatty() else subprocess.PIPE
    process = subprocess.Popen(  # noqa: S603 - the program is this package
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, text=True, start_new_session=True
    )
    said: list[str] = []
    try:
        for line in process.stderr or ():
            said.append(line.rstrip())
            if progress:
                print_line(said[-1], error=True)
        process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if process.returncode != 0:
        reasons = [line for line in said if line.startswith(("fedmq: ", "failed "))]
        text = "\n".join(reasons or said[-_KEPT_LINES:]).strip()
        raise RunError(text or f"fedmq compare ended with exit code {process.returncode}, see above")
    return Comparison(folder)
