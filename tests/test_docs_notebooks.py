"""The notebooks of the documentation run as printed, from top to bottom, in an IPython of this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.forked_programs import JOBS_HERE

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_photos", ["# 24 items with", "round 4 of 4", "mean_r1", "silo-01", "plotly"]),
        ("comparing_methods", ["rcsr minus fedavg", "95 % interval", "bytes.up", "mean_r1: difference", "plotly"]),
    ],
)
def test_a_notebook_runs_from_top_to_bottom(
    name: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("IPython")
    import plotly.io
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from traitlets.config import Config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv(JOBS_HERE, "1")
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # IPython puts its own there
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.kernel, shell.display_formatter.active_types = None, shell.display_formatter.format_types  # as in a notebook
    shown = []
    try:
        for cell in json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"]).replace("seeds=[0, 1, 2]", "seeds=[0, 1]")
                with capture_output() as captured:
                    result = shell.run_cell(source)
                result.raise_error()
                formatted, _ = shell.display_formatter.format(result.result)
                shown += [captured.stdout, str(formatted), *(str(output.data) for output in captured.outputs)]
    finally:
        InteractiveShell.clear_instance()
    for words in said:
        assert words in "\n".join(shown)
