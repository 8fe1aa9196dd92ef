"""``launcher: slurm``: silos and the evaluator as jobs of Slurm, submitted with submitit.

Slurm places and ends processes; see :mod:`fedmq.launch.remote_peer` for what they do. Each job has its own folder in
``jobs/`` of the run folder, which only the user can open: with its task, its keys, and at the end its result. The
command removes it when the job has ended.

submitit itself writes a pickle file for each job, which the job loads. It contains only :func:`run_job` and the path of
that folder. The command loads no pickle file.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil
from typing_extensions import override

from fedmq.config.scenario import Scenario
from fedmq.errors import InputError, RunError
from fedmq.launch.remote_peer import (
    DIED,
    ENVIRONMENT,
    MOST_BYTES,
    Cluster,
    PeerArguments,
    PeerTask,
    RemoteProcess,
    encode,
    key_files,
    run_peer,
    take_keys,
    write_private,
)
from fedmq.packages import package
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, make_folder, writing
from fedmq.text import print_line

#: Environment variable that runs the jobs on this machine if its value is :data:`_LOCAL`.
_PLACE, _LOCAL = "FEDMQ_SLURM", "local"
#: Interval between two queries of the states of the run's jobs [s].
_ASK_SECONDS = 5.0
#: Time that the result of a job may take to become visible on this machine after the job has ended [s].
_RESULT_SECONDS = 10.0
#: Time limit of Slurm's commands [s].
_COMMAND_SECONDS = 60.0
#: Time limit of a local job, a year [min].
_LOCAL_MINUTES = 365 * 24 * 60
#: Mode of the folders with the jobs' files.
_PRIVATE = 0o700
#: Files of a job's folder; the last one becomes the result once it is complete.
_TASK, _RESULT, _WRITING = "task.json", "result.json", "result.part"
#: End of the name of submitit's file of a job, after the job's number.
_SUBMITTED = "_submitted.pkl"
#: Beginning of the names of jobs.
_JOB_NAME = "fedmq "
#: States of a job that has ended and may have written a result.
_WITH_RESULT = frozenset({"COMPLETED", "FAILED", "FINISHED"})
#: Slurm's states of a job that has not ended.
_ALIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"}
    | {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)


def run_job(folder: str) -> NoReturn:
    """Run a silo, a host or the evaluator as a job, whose folder is given.

    submitit would ignore SIGTERM, with which Slurm cancels a job, and requeue it on SIGUSR2; here the command restarts
    jobs that end early. The process exits in this function, so that submitit does not write its own result.
    """
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = Path(folder)
    task, private = read_regular(place / _TASK, "the task of this job", MOST_BYTES), take_keys(place / "keys")
    ended = run_peer(task, place, private)
    # Not into a folder that the command has removed, as it takes this job for dead.
    (place / _WRITING).write_bytes(encode(ended))
    (place / _WRITING).replace(place / _RESULT)
    sys.exit(ended.code)


class Jobs(ABC):
    """An executor of jobs: Slurm, or this machine."""

    @abstractmethod
    def ended(self, job: Any) -> str:
        """The job's final state, in capitals; empty while it waits or runs, or while its state is unknown."""

    @abstractmethod
    def cancel(self, job: Any) -> None:
        """Cancel the job, and end its process."""


@dataclass
class SlurmJobs(Jobs):
    """Jobs of Slurm. Asks ``squeue``, which needs no accounting database, unlike submitit's ``sacct``."""

    states: dict[str, str] = field(default_factory=dict)  # Slurm's state of each job of the run, by its number
    reasons: set[str] = field(default_factory=set)  # the reasons for waiting that were already printed
    asked: float = -math.inf

    @override
    def ended(self, job: Any) -> str:
        self.states.setdefault(job.job_id, "PENDING")
        if time.monotonic() - self.asked > _ASK_SECONDS:
            self._ask()
        state = self.states[job.job_id]
        return "" if state in _ALIVE else state

    def _ask(self) -> None:
        """Query the states of the run's jobs; keeps the previous ones if Slurm does not answer."""
        self.asked = time.monotonic()
        try:
            lines = _answer("squeue", "--me", "--states=all", "--noheader", "--format=%A|%T|%r").splitlines()
        except OSError:
            return
        rows = [row for line in lines if len(row := line.split("|")) == 3]
        now = {number: state for number, state, _reason in rows}
        # Slurm forgets a job some minutes after its end.
        self.states = {number: now.get(number, "FORGOTTEN") for number in self.states}
        waiting = [why for number, state, why in rows if number in self.states and state == "PENDING" and why != "None"]
        for why in sorted(set(waiting) - self.reasons):
            self.reasons.add(why)
            print_line(f"slurm: jobs in the queue: {waiting.count(why)} ({why})", error=True)

    @override
    def cancel(self, job: Any) -> None:
        self.asked = -math.inf
        _cancel(job.job_id)


@dataclass(frozen=True)
class LocalJobs(Jobs):
    """Jobs on this machine, of submitit's local executor: a rehearsal where there is no Slurm."""

    @override
    def ended(self, job: Any) -> str:
        state = str(job.state)
        return "" if state == "RUNNING" else state

    @override
    def cancel(self, job: Any) -> None:
        if not self.ended(job):
            with contextlib.suppress(psutil.NoSuchProcess):  # the number of the job is the id of the process's parent
                waiting = psutil.Process(int(job.job_id))
                for process in waiting.children(recursive=True) or [waiting]:
                    process.kill()


class SlurmProcess(RemoteProcess):
    """A silo, a host or the evaluator as a job in its own folder, which is removed at its end.

    submitit's result of the job is never asked for, as it would be unpickled.
    """

    def __init__(self, jobs: Jobs, job: Any, place: Path, name: str, silos: Sequence[str], folder: RunFolder) -> None:
        super().__init__(name, silos, folder)
        self._jobs, self._job, self._place = jobs, job, place
        self._ended_at: float | None = None

    @override
    def poll(self) -> int | None:
        code = self._code_of_result()
        if code is not None:
            self._keep_log()
            shutil.rmtree(self._place, ignore_errors=True)
        return code

    def _code_of_result(self) -> int | None:
        result = self._place / _RESULT
        if os.path.lexists(result):
            allowed = "the result of a job"
            return self.collect(lambda: read_regular(result, allowed, MOST_BYTES, links=False))
        state = self._jobs.ended(self._job)
        if not state:
            return None
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        if state in _WITH_RESULT and time.monotonic() - self._ended_at < _RESULT_SECONDS:
            # A change of the folder makes a network file system look for new files in it.
            with contextlib.suppress(OSError):
                self._place.chmod(_PRIVATE)
            return None
        self.say(f"job {self._job.job_id} ended as {state}, see {self._keep_log()}")
        return DIED

    def _keep_log(self) -> Path:
        """Name the log of the job after the process; returns its path."""
        log = Path(self._job.paths.folder) / f"{self.name}-{self._job.job_id}.log"
        with contextlib.suppress(FileNotFoundError):  # it never started
            self._job.paths.stdout.rename(log)
        return log

    @override
    def kill(self) -> None:
        self._ended_at = -math.inf  # there will be no result to wait for
        self._jobs.cancel(self._job)


@dataclass(frozen=True)
class SlurmCluster(Cluster):
    """The cluster of Slurm that this machine belongs to; see :class:`fedmq.launch.remote_peer.Cluster`."""

    submitit: Any
    executor: Any
    jobs: Jobs
    bind: str  # URI at which the coordinator listens
    folder: RunFolder
    gpus: int  # number of GPUs of each process

    @classmethod
    @contextlib.contextmanager
    def connected(cls, scenario: Scenario, folder: RunFolder) -> Iterator[SlurmCluster]:
        """Check that Slurm answers and has machines for these processes; at the end, remove the jobs' files.

        ``FEDMQ_SLURM=local`` in the environment runs the jobs on this machine.

        Raises:
            InputError: submitit is not installed, or Slurm does not answer or can never place such a process.
        """
        submitit = package("submitit", "slurm", "launcher slurm")
        local = os.environ.get(_PLACE) == _LOCAL
        options = _options(scenario)
        if not local:
            _check_slurm(options)
        files = folder.root.absolute() / "jobs"
        if files.is_symlink():
            raise InputError(str(files), "a link", "a folder of the run folder itself: remove the link")
        make_folder(files)
        with writing(files):
            files.chmod(_PRIVATE)
        if not local:
            _cancel_left(files)
        _remove_files(files)
        if local:
            executor = submitit.LocalExecutor(files)
            executor.update_parameters(timeout_min=_LOCAL_MINUTES, gpus_per_node=options["gpus_per_node"] or 0)
            executor.update_parameters(stderr_to_stdout=True)
        else:
            executor = submitit.SlurmExecutor(files)
            executor.update_parameters(**options)
        jobs = LocalJobs() if local else SlurmJobs()
        address = "127.0.0.1" if local else _address()
        try:
            yield cls(submitit, executor, jobs, f"tcp://{address}:*", folder, options["gpus_per_node"] or 0)
        finally:
            _remove_files(files)

    def start(self, name: str, arguments: PeerArguments) -> SlurmProcess:
        """Submit a job for the process.

        Raises:
            RunError: Slurm refuses the job.
        """
        if isinstance(self.executor, self.submitit.SlurmExecutor):
            self.executor.update_parameters(job_name=f"{_JOB_NAME}{name}")
        task = PeerTask.of(arguments, gpu=self.gpus > 0)
        files = Path(self.executor.folder)
        with writing(files):
            place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=files))
            (place / _TASK).write_bytes(encode(task))
            write_private(place, key_files(arguments))
        # Ctrl-C is handled by the command: neither sbatch nor a local job, which inherit this, may see it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with self.submitit.helpers.environment_variables(**ENVIRONMENT):
                job = self.executor.submit(run_job, str(place))
        except self.submitit.core.utils.FailedJobError as error:
            raise RunError(f"{name}: Slurm refuses the job: {_reason(str(error))}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return SlurmProcess(self.jobs, job, place, name, task.names, self.folder)


def _options(scenario: Scenario) -> dict[str, Any]:
    """What each job needs, as parameters of submitit's executor for Slurm; None leaves it to Slurm."""
    needs = scenario.silos.needs
    if needs.gpus != int(needs.gpus):
        raise InputError("silos.needs.gpus", needs.gpus, "a whole number with launcher slurm")
    return {
        "cpus_per_task": max(1, math.ceil(needs.cpus)),
        "gpus_per_node": int(needs.gpus) or None,
        "mem": None if needs.memory_gb is None else f"{math.ceil(needs.memory_gb * 1000)}M",
        # Partition, account and time limit depend on the site: sbatch takes them from its own environment variables.
        "time": None,
        # The supervisor restarts what dies, with its own limit.
        "additional_parameters": {"no-requeue": True},
        "stderr_to_stdout": True,
        # One process per job. As a step of srun, it would not get the job's cores from Slurm 22.05 on.
        "use_srun": False,
    }


def _answer(*command: str) -> str:
    """Standard output of one of Slurm's commands; raises OSError if it is missing, fails, or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMMAND_SECONDS)  # noqa: S603
    except subprocess.CalledProcessError as error:
        raise OSError(_reason(error.stderr)) from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} does not answer") from None
    return done.stdout


def _cancel(number: str) -> None:
    """Cancel a job, which may have ended."""
    with contextlib.suppress(OSError):
        _answer("scancel", number)


def _reason(text: str) -> str:
    """The last line that one of Slurm's commands printed."""
    return text.strip().rpartition("\n")[2] or "no reason given"


def _check_slurm(options: Mapping[str, Any]) -> None:
    """Refuse to start without Slurm, or with needs that none of its machines can ever meet."""
    try:
        _answer("squeue", "--me", "--noheader")
    except OSError as error:
        found = error.strerror or str(error)
        allowed = "a machine from which `squeue` and `sbatch` work"
        raise InputError("launcher slurm", found, f"{allowed}; {_PLACE}={_LOCAL} rehearses on this one") from None
    flags = {"cpus-per-task": "cpus_per_task", "gpus-per-node": "gpus_per_node", "mem": "mem"}
    wanted = [f"--{flag}={options[key]}" for flag, key in flags.items() if options[key] is not None]
    try:
        _answer("sbatch", "--test-only", *wanted, "--wrap=true")
    except OSError as error:
        allowed = "needs of one process that a machine of the cluster has"
        raise InputError("silos.needs", f"{' '.join(wanted)}: {error}", allowed) from None


def _cancel_left(files: Path) -> None:
    """Cancel the jobs that a killed command left behind, if they belong to this user and to fedmq."""
    left = {path.name.removesuffix(_SUBMITTED) for path in files.glob(f"*{_SUBMITTED}")}
    if not left:
        return
    with contextlib.suppress(OSError):
        rows = [line.partition("|") for line in _answer("squeue", "--me", "--noheader", "--format=%A|%j").splitlines()]
        for number in sorted(number for number, _, name in rows if number in left and name.startswith(_JOB_NAME)):
            _cancel(number)


def _remove_files(files: Path) -> None:
    """Remove the files of all jobs but their logs."""
    for pattern in ("*.pkl", "*.sh", ".submission_file_*"):
        for path in files.glob(pattern):
            path.unlink(missing_ok=True)
    for path in files.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _address() -> str:
    """The address at which the cluster's machines reach this one, as the host of a URI.

    It is the address from which this machine reaches Slurm's controller, or else the address of its host name.
    """
    found = re.search(
        r"^SlurmctldHost(?:\[0\])?\s*=\s*([^\s(]+)(?:\((.*)\))?", _answer("scontrol", "show", "config"), re.M
    )
    controller = (found.group(2) or found.group(1)) if found else "localhost"
    addresses = [ipaddress.ip_address(each) for host in (controller, socket.gethostname()) for each in _route(host)]
    best = next((each for each in addresses if not each.is_loopback), None)
    if best is None:
        nodes = sorted({*_answer("sinfo", "--noheader", "--Node", "--format=%o").split()})
        for node in nodes:
            if not all(ipaddress.ip_address(each).is_loopback for each in _route(node)):
                allowed = f"an address that {node} reaches: see /etc/hosts"
                raise InputError("launcher slurm", f"{socket.gethostname()} is 127.0.0.1 here", allowed)
        return "127.0.0.1"
    return f"[{best}]" if best.version == 6 else str(best)


def _route(host: str) -> Sequence[str]:
    """The address from which this machine reaches a host; nothing is sent. Empty if it has none."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return (str(probe.getsockname()[0]),)
    return ()
