"""Time from the command until all silos are ready, where it goes, and the memory of all processes.

``python -m benchmarks --only startup`` prints the profile of the start of 30 silos.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Number, Result, spread
from benchmarks.runs import rcsr_scenario, simulated
from fedmq.profiling import COMMAND
from fedmq.runs.profile import Profile, read
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.messages import COORDINATOR

#: Number of runs of each number of silos.
_REPEATS = {30: 3, 100: 1}
#: Imports of packages that take less than this are one line together [s].
_SMALL_S = 0.1
#: The imports of the process from which all others are forked.
_FORKSERVER = "import fedmq.launch.preload"
#: A command whose own process reports its imports, but not its forkserver, which would inherit the option.
_COMMAND = "import sys; sys._xoptions.clear(); from fedmq.__main__ import main; sys.argv[0] = 'fedmq'; main()"


def run(*, smoke: bool = False) -> Result:
    """Measure runs of one round; ``smoke``: of two silos on synthetic features."""
    aims, memory_aims = {30: "at most 3 s", 100: "at most 6 s"}, {30: "at most 4096 MB"}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", _FORKSERVER], check=True)
    least = time.perf_counter() - began
    numbers = [Number("floor: a process with the imports of all silos", least, "s")]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        scenario = rcsr_scenario(folder, smoke=smoke)
        for count, repeats in ({2: 1} if smoke else _REPEATS).items():
            settings = ("rounds=1", f"silos.count={count}")
            # Fills the cache with the data set and its partition: computing them is not part of start-up.
            simulated(scenario, folder / f"warm-{count}", *settings, "launcher=inline")
            starts, summaries = [], []
            for number in range(repeats):
                out = folder / f"run-{count}-{number}"
                summaries.append(simulated(scenario, out, *settings, options=("--profile",)))
                starts.append(_phases(out))
            memory = max(summary["processes"]["peak_pss_mb"] for summary in summaries)
            ready = [summary["seconds"]["startup"] for summary in summaries]
            whole = spread(f"{count} silos ready after", ready, "s", aims.get(count, ""))
            numbers += [whole, Number("  as a multiple of the floor", whole.value / least, "x")]
            numbers += [spread(f"  {phase}", [each[phase] for each in starts], "s") for phase in starts[0]]
            numbers += [
                Number(f"memory of all processes, {count} silos", memory, "MB PSS", memory_aims.get(count, "")),
                Number("  the same per silo", memory / count, "MB PSS"),
            ]
        words = ("scenario", str(scenario), "--out", str(folder / "profile"), "--quiet", "--set", "rounds=1")
        numbers += _imports("silos", _FORKSERVER)
        numbers += _imports("command", _COMMAND, *words, "--set", "silos.count=2")
    data = "synthetic features" if smoke else "openmoji and lite"
    notes = [
        f"rcsr on {data}, one round, features and partition in the cache",
        "phases as in fedmq scenario --profile, of one process each",
        "imports: self times in one process each; in a run, processes import in parallel",
    ]
    if sys.dont_write_bytecode:
        notes.append("PYTHONDONTWRITEBYTECODE is set: each process compiles its modules, which doubles the imports")
    return Result("startup", tuple(numbers), tuple(notes))


def _phases(run: Path) -> dict[str, float]:
    """Seconds that the programs of a profiled run took to start and to get their data, of silos the median."""
    profile = Profile.of(read(RunFolder(run).profile))
    parties = {COMMAND: (COMMAND,), COORDINATOR: (COORDINATOR,), "one silo (median)": profile.silos}
    return {
        f"{who}: {phase}": statistics.median(profile.of_all([name])[phase] for name in names)
        for who, names in parties.items()
        for phase in ("start", "data")
    }


def _imports(who: str, code: str, *words: str) -> Iterator[Number]:
    """Seconds that a process spends in its imports: in total, and by package."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, *words], capture_output=True, text=True, check=True
    )
    seconds: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        head, _, rest = line.partition("import time:")
        own, _, module = rest.partition("|")
        if not head and own.strip().isdigit():
            seconds[module.rpartition("|")[2].strip().partition(".")[0]] += int(own) / 1e6
    yield Number(f"imports of the {who}", sum(seconds.values()), "s")
    large = {package: each for package, each in seconds.items() if each >= _SMALL_S}
    for package, each in sorted(large.items(), key=lambda item: -item[1]):
        yield Number(f"  {package}", each, "s")
    yield Number(f"  {len(seconds) - len(large)} others", sum(seconds.values()) - sum(large.values()), "s")
