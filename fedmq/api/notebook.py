"""Progress of a run in a Jupyter notebook, without widgets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from typing import Any

from fedmq.runs.run_records import EvaluationLine, MergeLine, MetricsLine


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def notebook_bar(name: str, rounds: int, brief: Callable[[EvaluationLine], str]) -> Callable[[MetricsLine], None]:
    """Show a progress bar below the cell.

    Args:
        name: name of the scenario.
        rounds: number of rounds.
        brief: text of an evaluation.

    Returns:
        A function that updates the bar with a line of ``metrics.jsonl``.
    """
    from IPython.display import HTML, display  # noqa: PLC0415 - there only in a notebook

    done, text = 0, "starting the silos"

    def shown() -> Any:
        bar = f"<progress max='{rounds}' value='{done}'></progress>"
        return HTML(f"{escape(name)} {bar} round {done} of {rounds} {escape(text)}")

    handle = display(shown(), display_id=True)

    def show(line: MetricsLine) -> None:
        nonlocal done, text
        if isinstance(line, MergeLine):
            done = line.version
            text = "" if text == "starting the silos" else text
        elif isinstance(line, EvaluationLine):
            text = brief(line)
        handle.update(shown())

    return show
