"""Open the model of a finished run; personal models are rebuilt by the code of coordinator and silo."""

from __future__ import annotations

from pathlib import Path

import protocols
from coordinator.release import final_evaluation_request
from fedmq.retrieval import select_model
from fedmq.retrieval.released_model import Release
from fedmq.text import Progress
from silos.personal_model import personal_model_of


def open_run_model(
    run: Path, device: str | None, silo: str | None, progress: Progress | None = None, site: Path | None = None
) -> Release:
    """Open a finished run for retrieval; arguments and errors as in :func:`fedmq.retrieval.select_model.opened`."""
    programs = select_model.Programs(protocols.traits_of, final_evaluation_request, personal_model_of)
    return select_model.opened(run, device, silo, programs, progress, site)
