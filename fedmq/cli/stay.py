"""``fedmq silo --stay``: a standing silo, which takes part in one run after the other of a coordinator it trusts."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer

from fedmq.cli.options import ProcessOptions, silo_arguments
from fedmq.cli.scenarios import refuse_start, resolved_file
from fedmq.config.resolve import ResolvedRun
from fedmq.config.run_id import folder_of
from fedmq.config.site import Site
from fedmq.errors import FedmqError, InputError
from fedmq.runs.status import ENDED_PHASES, StatusFile, status_of
from fedmq.storage.logs import Logger, LogOptions, open_log
from fedmq.storage.run_folder import write_text
from fedmq.text import print_line
from fedmq.wire.inquiry import ask_status
from fedmq.wire.keys import load_accepted, load_identity

#: Time between two questions to the coordinator whether there is a run [s].
_ASK_SECONDS = 2.0
#: The value of ``--accept`` for every scenario with which the site's policy lets the silo take part.
BY_POLICY = "policy"


def stay(site: Site, given: ProcessOptions, accept: Collection[str], logs: LogOptions | None) -> NoReturn:
    """Take part in one run after the other until a signal ends the process.

    Raises:
        InputError: a key cannot be read, or a value of ``accept`` is not allowed.
        RunError: the silo cannot continue, e.g. as its disk is full.
    """
    from fedmq.wire.channel import OtherRunError  # noqa: PLC0415 - imports torch
    from silos.program import run_silo  # noqa: PLC0415

    name, keys, connect, out = _needed(site, given)
    _check(accept, given.policy or site.policy)
    identity, accepted, logger = load_identity(keys, name), load_accepted(keys), open_log(logs, name)
    passed, said = set[str](), ""
    while True:
        status, line = _asked(lambda: status_of(ask_status(connect, identity, accepted)))
        offer = None if status is None or status.coordinator is None else status.coordinator.offer
        if status is None or offer is None or offer.log in passed:
            if line != said:
                logger.info("waiting for the next run", because=line)
            said = line
            time.sleep(_ASK_SECONDS)
            continue
        said = ""
        try:
            run = accepted_run(status.run, offer.scenario, out, accept, logger)
            if run is None:
                passed.add(offer.log)
                continue
            silo = silo_arguments(run, given, logs)
            silo = replace(silo, out=out / folder_of(run.id, offer.log), ends_with_other_run=True)
            refuse_start("SILO", run, silo)
            run_silo(silo, logger, identity=identity)
        except OtherRunError as error:
            logger.info("left the run", because=str(error))
        except InputError as error:
            logger.warning("took no part in the run", run=status.run, because=str(error))
            passed.add(offer.log)


def _needed(site: Site, given: ProcessOptions) -> tuple[str, Path, str, Path]:
    found = {key: getattr(given, key) or getattr(site, key) for key in ("name", "keys", "connect", "out")}
    for key, value in found.items():
        if value is None:
            raise InputError(site.place(key), "nothing", f"{key}, here or as --{key}, with --stay")
    return found["name"], found["keys"], found["connect"], found["out"]


def _check(accept: Collection[str], policy: Path | None) -> None:
    for each in accept:
        if each != BY_POLICY and not re.fullmatch("[0-9a-f]{64}", each):
            raise InputError(
                "--accept", each, f"the SHA-256 of a scenario, as `fedmq silo --stay` says it, or {BY_POLICY}"
            )
    if BY_POLICY in accept and policy is None:
        raise InputError("--accept", BY_POLICY, "with a policy, as --policy or as policy in the site file")


def _asked(ask: Callable[[], StatusFile]) -> tuple[StatusFile | None, str]:
    """The status of a run that has not ended, or None and why there is none."""
    try:
        status = ask()
    except FedmqError as error:  # no coordinator runs, or this key is not accepted yet
        return None, str(error)
    if status.phase in ENDED_PHASES:
        return None, f"{status.run} has ended"
    return status, f"took no part in {status.run}"


def accepted_run(run_id: str, text: str, out: Path, accept: Collection[str], logger: Logger) -> ResolvedRun | None:
    """A run that a coordinator offers, if its scenario is accepted here; accepted ones are kept in ``scenarios/``."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    kept, offered = (out / "scenarios" / f"{digest}{end}" for end in (".yaml", "-offered.yaml"))
    known = kept.is_file()
    if not known:
        write_text(offered, text)
    run = resolved_file(kept if known else offered, manual=True, adopt=False)
    if run.id != run_id:
        raise InputError(f"{offered}: the scenario", run.id, f"that of the run {run_id}, which the coordinator names")
    if known or digest in accept or BY_POLICY in accept or _confirmed(text, run_id):
        if not known:
            offered.rename(kept)
        return run
    allowed = f"read {offered}, and start this command with --accept {digest}"
    logger.warning("a run with a scenario that is not accepted here", run=run_id, allowed=allowed)
    return None


def _confirmed(text: str, run_id: str) -> bool:
    """Whether the operator, on a terminal, accepts a scenario that is shown."""
    if not _terminal():
        return False
    print_line(text, error=True)
    return typer.confirm(f"take part in {run_id}, in this and every later run of this scenario?", err=True)


def _terminal() -> bool:
    return sys.stdin.isatty()
