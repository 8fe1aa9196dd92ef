"""Write docs/scenario.md and docs/methods.md: every key of a scenario and every option, out of the code.

    python tools/make_reference.py

A test holds the committed pages to what this makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import protocols
from fedmq.cli import scenario_keys

DOCS = Path(__file__).parent.parent / "docs"

_SCENARIO = """# Scenario keys

A scenario is one YAML file; `fedmq scenario FILE --set KEY=VALUE` changes a key for one run, with a dot between a part
and its key, as `--set training.learning_rate=1e-3`. A key that is not given has its default, and `scenario.yaml` in a
run's folder has every default written out. What is not listed is refused. A page made by `tools/make_reference.py` from
the code.

`protocol`, `objective` and `data.name` may also name a Python file of your own, `./mine.py`, seen from the scenario's
folder (from the working directory with `--set`). It holds `PROTOCOL`, `OBJECTIVE` or `DATA_SET`; CONTRIBUTING.md shows
each. What is executed is a copy in the cache, under the file's SHA-256, which the run's id holds too: another version
is another run. A run folder executes no file that this machine's user has not named before: `fedmq replay`, `search`
and `audit --probe` of a run from elsewhere say so, and `fedmq protocols ./mine.py` (or `losses`, or `data list`) lets
them execute that file. Do not share the cache folder with people whose code you would not run. An installed package
offers the same by the entry point groups `fedmq.protocols`, `fedmq.objectives` and `fedmq.data_sets`; its names are
not part of the run's id beyond the name itself.
"""
_FAULTS = """
## faults

A list; each entry has a `kind` and the keys below. [faults.md](faults.md) shows a line of YAML for each and says what
happens. All that strike silos take:

"""
_METHODS = """# Methods and base losses

What `protocol:` and `objective:` of a scenario may name, with all their options; `fedmq protocols NAME` and
`fedmq losses NAME` print the same. How the baselines were read is in [baselines.md](baselines.md), what was measured in
[results/](results). A page made by `tools/make_reference.py` from the code.

## Methods

`protocol: NAME`, or `protocol: {name: NAME, option: value}`. `fedmq scenario`, `compare`, `sweep` and `coordinator`
warn of an option that is set though the switch it belongs to is off.
"""
_LOSSES = """
## Base losses

`objective: NAME`, or `objective: {base: NAME, bits: 32, option: value}`. The default, `info_nce`, trains adapters and
heads over a frozen encoder and has no options of its own: its temperature `tau` is the method's. `bits` and `hidden`
are sizes of the network.
"""
#: What `objective` and `protocol` hold besides.
_OPTIONS = {
    "protocol": "[methods.md](methods.md) has the options of each method. `protocol: fedavg` is short for its name.",
    "objective": "[methods.md](methods.md) has the options of each base loss. `objective: dcmh` is short for its base.",
}


def scenario_page() -> str:
    """docs/scenario.md."""
    page = [_SCENARIO]
    for title, (purpose, keys) in scenario_keys.parts().items():
        page.append(f"\n## {title}\n\n{purpose}\n" if title else f"\n{purpose}\n")
        page.append(f"\n{_OPTIONS[title]}\n" if title in _OPTIONS else "")
        page.append(f"\n{scenario_keys.as_table(keys)}")
    of_kinds = scenario_keys.faults()
    common = next(iter(of_kinds.values()))[1][:5]
    page.append(_FAULTS + scenario_keys.as_table(common))
    page.append("\n")
    rows = ["| kind | what happens | keys of its own |", "|---|---|---|"]
    for kind, (purpose, keys) in of_kinds.items():
        own = [key for key in keys if key not in common]
        without = [key.name for key in common if key not in keys]
        told = [f"`{key.name}` ({key.values}; {key.default}): {key.meaning}" for key in own]
        told += [f"without {', '.join(f'`{name}`' for name in without)}"] if without else []
        rows.append(f"| `{kind}` | {purpose} | {'<br>'.join(told) or '-'} |")
    return "".join(page) + "\n".join(rows) + "\n"


def methods_page() -> str:
    """docs/methods.md."""
    page = [_METHODS]
    for name in protocols.names():
        page.append(_section(name, protocols.summary(name), scenario_keys.options(protocols.load(name).Options)))
    page.append(_LOSSES)
    for name in protocols.losses():
        page.append(_section(name, protocols.loss_summary(name), scenario_keys.loss(protocols.loss(name))))
    return "".join(page)


def _section(name: str, summary: str, keys: Sequence[scenario_keys.Key]) -> str:
    return f"\n### {name}\n\n{summary}\n\n{scenario_keys.as_table(keys)}"


def main() -> None:
    """Write both pages."""
    (DOCS / "scenario.md").write_text(scenario_page(), encoding="utf-8")
    (DOCS / "methods.md").write_text(methods_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
