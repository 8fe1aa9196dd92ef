"""Write the generated pages of docs/reference: all scenario keys, options, commands and events of message logs.

    python tools/make_reference.py

A test compares the committed pages with the output.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

import protocols
from fedmq.cli import key_reference
from fedmq.cli import main as cli
from fedmq.experiments.files import SCHEMAS, schema_of
from fedmq.models.objective_registry import OBJECTIVES
from fedmq.wire.log_events import LogEvent, TimelineEvent

DOCS = Path(__file__).parent.parent / "docs" / "reference"
#: Longest line of a page, in characters.
WIDTH = 116

_SCENARIO = """# Scenario keys

A scenario is one YAML file; `fedmq scenario FILE --set KEY=VALUE` changes a key for one run, with a dot between a
section and its key, as in `--set training.learning_rate=1e-3`. A key that is not given has its default, and
`scenario.yaml` in a run's folder has every default written out. Keys that are not listed here are refused.

Values are read as YAML 1.2: `010` is 10, and `1:30`, `on` and `no` are strings. A file may have at most 256 KiB and,
after aliases have been expanded, at most 100,000 values.

`protocol`, `objective` and `data.name` may also name a Python file of your own, `./mine.py`:
[your own methods](../howto/own_methods.md) shows one of each, and says what is executed and when.

Each entry gives the key, its values and default, and its meaning. `tools/make_reference.py` writes this page from the
code.
"""
_FAULTS = """
## faults

A list; each entry has a `kind` and the keys below. [Faults](faults.md) shows a line of YAML for each and says what
happens. All faults that strike silos take:

"""
_METHODS = """# Methods and base losses

All methods (`protocol:` of a scenario) and base losses (`objective:`): what each computes, where it departs from its
paper, and its options, which `fedmq protocols NAME` and `fedmq losses NAME` print too.
[Baselines](../explanation/baselines.md) compares the methods, [results](../results/README.md) has what was measured.
`tools/make_reference.py` writes this page from the code.

## Methods

`protocol: NAME`, or `protocol: {name: NAME, option: value}`. `fedmq scenario`, `compare`, `sweep` and `coordinator`
warn about options that have no effect because their switch is off.

`fedcafe`, `fedhap`, `fedscmr`, `feduch` and `rcsr` have presets: `protocol: {name: rcsr, preset: printed}` trains as
the paper prints, `released` as the authors' code does where it is public, `ours` as we would. A preset fills in what
the scenario does not give, in its own options and in other sections; `scenario.yaml` of the run folder has the values.
What a preset does not name has its default. [Departures](#departures-from-the-papers) lists what no preset can undo.
"""
#: Around the section of the methods' page that is written by hand.
_BEGIN, _END = "<!-- departures: begin -->\n", "<!-- departures: end -->\n"
_UNPAIRED = """
## Items that lack a modality

A silo that holds both modalities may have items with only one of them. The table shows what each method does with these
items, with its default options. Ignored items are counted in `summary.json` and at the end of a run. The table does not
describe how a method treats silos that lack a modality altogether.
[Your own data](../howto/own_data.md#items-that-lack-a-modality) has the details.

| method | items that lack a modality |
|---|---|
"""
_LOSSES = """
## Base losses

`objective: NAME`, or `objective: {base: NAME, bits: 32, option: value}`. The default, `info_nce`, trains adapters and
heads over a frozen encoder and has no options of its own: its temperature `tau` is the method's. `bits` and `hidden`
are sizes of the network.
"""
_COMMANDS = """# Command line

Every command with its arguments and options, as `fedmq COMMAND --help` prints them. [Exit codes](exit_codes.md) has
what a command returns. `tools/make_reference.py` writes this page from the code.
"""
#: Where to find the options of `objective` and `protocol`.
_OPTIONS = {
    "protocol": "[Methods](methods.md) has the options of each method. `protocol: fedavg` is short for its name.",
    "objective": "[Methods](methods.md) has the options of each base loss. `objective: dcmh` is short for its base.",
}


def scenario_page() -> str:
    """Text of docs/reference/scenario.md."""
    page = [_SCENARIO]
    for title, (purpose, keys) in key_reference.parts().items():
        page.append(f"\n## {title}\n" if title else "")
        page.append(f"\n{_wrapped(purpose)}\n")
        page.append(f"\n{_OPTIONS[title]}\n" if title in _OPTIONS else "")
        page.append(f"\n{_list(keys)}")
    return "".join(page) + _faults(key_reference.faults())


def _faults(of_kinds: Mapping[str, tuple[str, tuple[key_reference.Key, ...]]]) -> str:
    common = next(iter(of_kinds.values()))[1][:5]
    page = [_FAULTS, _list(common)]
    for kind, (purpose, keys) in of_kinds.items():
        specific = [key for key in keys if key not in common]
        without = ", ".join(f"`{key.name}`" for key in common if key not in keys)
        page.append(f"\n### {kind}\n\n{_wrapped(purpose)}\n")
        page.append(f"\nIt takes no {without}.\n" if without else "")
        page.append(f"\n{_list(specific)}" if specific else "")
    return "".join(page)


def methods_page() -> str:
    """Text of docs/reference/methods.md."""
    page = [_METHODS]
    shared = key_reference.options(protocols.load("fedavg").Options)
    for name in protocols.names():
        about = _about(protocols.METHODS.module(name))
        keys = key_reference.options(protocols.load(name).Options)
        same = [] if name == "fedavg" else [key for key in keys if key in shared]
        page.append(_section(name, about, [key for key in keys if key not in same]))
        listed = ", ".join(f"`{key.name}`" for key in same)
        page.append(_entry(f"- {listed}: as of [`fedavg`](#fedavg).") if same else "")
    before = (DOCS / "methods.md").read_text(encoding="utf-8")
    page += ["\n", _BEGIN, before.partition(_BEGIN)[2].partition(_END)[0], _END]  # written by hand
    page += [_UNPAIRED, *(f"| `{name}` | {protocols.unpaired(name)} |\n" for name in protocols.names())]
    page.append(_LOSSES)
    for name in protocols.losses():
        page.append(_section(name, _about(OBJECTIVES.module(name)), key_reference.loss(protocols.loss(name))))
    return "".join(page)


def commands_page() -> str:
    """Text of docs/reference/command_line.md."""
    page = [_COMMANDS]
    for name, command in commands().items():
        usage = " ".join([f"fedmq {name}", *(_argument(each) for each in command.params if not _is_option(each))])
        page.append(f"\n## fedmq {name}\n\n    {usage} [OPTIONS]\n")
        text = "\n\n".join(_paragraph(each) for each in (command.help or "").split("\n\n"))
        page += ["\n", re.sub(r"^(    .+)\n\n(?=    )", r"\1\n", text, flags=re.MULTILINE), "\n"]
        page.append("\n" if command.params else "")
        page += [_parameter(each) for each in command.params]
    return "".join(page)


def message_logs_page() -> str:
    """The page of message logs, with its tables of events written anew."""
    page = (DOCS / "message_logs.md").read_text(encoding="utf-8")
    before, begin, rest = page.partition("<!-- events: begin -->\n")
    _, end, after = rest.partition("<!-- events: end -->\n")
    timeline = "".join(f"| `{event}` | {event.meaning} |\n" for event in TimelineEvent)
    notes = "".join(f"| `{event}` | {event.level} | {event.meaning} |\n" for event in LogEvent)
    tables = f"""
Of the timeline (`"action":"timeline"`):

| event | meaning |
|---|---|
{timeline}
Of notes (`"action":"note"`), with the level that each has in the log for operators:

| event | level | meaning |
|---|---|---|
{notes}
"""
    return before + begin + tables + end + after


def commands() -> dict[str, Any]:
    """All commands by name: `scenario`, `data check`, ..."""
    program: Any = typer.main.get_command(cli.app)
    found: dict[str, Any] = {}
    for name, command in program.commands.items():
        below = getattr(command, "commands", None)
        found |= {f"{name} {each}": child for each, child in below.items()} if below else {name: command}
    return found


def pages() -> dict[str, str]:
    """The generated pages by file name."""
    schemas = {f"schemas/{kind}.json": json.dumps(schema_of(kind), indent=2) + "\n" for kind in SCHEMAS}
    return {
        "scenario.md": scenario_page(),
        "methods.md": methods_page(),
        "command_line.md": commands_page(),
        "message_logs.md": message_logs_page(),
        **schemas,
    }


def _section(name: str, about: str, keys: Sequence[key_reference.Key]) -> str:
    return f"\n### {name}\n\n{about}\n\n{_list(keys)}"


def _about(module: object) -> str:
    """A module's docstring as Markdown: what it computes, and where it departs from its paper."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.getdoc(module) or "").replace("``", "`")
    paragraphs = (_listed_or_wrapped(each) for each in text.split("\n\n"))
    return "\n\n".join(paragraphs)


def _listed_or_wrapped(paragraph: str) -> str:
    if not paragraph.startswith("- "):
        return _wrapped(" ".join(paragraph.split()))
    items = re.split(r"\n(?=- )", paragraph)
    return "\n".join(_wrapped(" ".join(item.removeprefix("- ").split()), "- ") for item in items)


def _list(keys: Iterable[key_reference.Key]) -> str:
    """Keys as a Markdown list of name, values, default and meaning."""
    return "".join(
        _entry(f"- `{key.name}` ({key.values}; {_default(key.default)}): {_sentence(key.meaning)}") for key in keys
    )


def _default(default: str) -> str:
    if default == key_reference.REQUIRED:
        return default
    return f"default `{default}`" if default else "empty by default"


def _entry(text: str) -> str:
    """A wrapped entry of a Markdown list."""
    return _wrapped(text.removeprefix("- "), "- ") + "\n"


def _sentence(text: str) -> str:
    """The text with a full stop; its first letter is unchanged, as it may be a YAML value."""
    return text if text.endswith((".", ":")) else text + "."


def _wrapped(text: str, first: str = "") -> str:
    """A paragraph in lines of at most :data:`WIDTH` characters, without breaks inside backticks."""
    unbroken = re.sub(r"`[^`]{1,60}`", lambda found: found.group().replace(" ", "\0"), text)
    wrap = textwrap.TextWrapper(WIDTH, first, " " * len(first), break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.wrap(unbroken)).replace("\0", " ")


def _is_option(parameter: Any) -> bool:
    return str(parameter.opts[0]).startswith("-")


def _argument(parameter: Any) -> str:
    """The name of an argument, in brackets if it may be left out."""
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required else f"[{name}]"


def _parameter(parameter: Any) -> str:
    """An argument or option of a command as an entry of a list."""
    notes = [] if not parameter.required else ["required"]
    if not _is_option(parameter):
        head = f"`{_argument(parameter)}`"
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        head = f"`{' '.join(parameter.opts)}{value}`"
        notes += ["may be repeated"] if parameter.multiple else []
        default = None if parameter.is_flag or callable(parameter.default) else parameter.default
        notes += [f"default `{default}`"] if default not in (None, (), []) else []
    text = _sentence(_plain(parameter.help)) if parameter.help else ""
    bounds = f" ({', '.join(notes)})" if notes else ""
    return _entry(f"- {head}{bounds}{': ' if text else ''}{text}")


def _paragraph(text: str) -> str:
    """A paragraph of a command's help; examples become code blocks."""
    example = re.fullmatch(r"Example: \[bold\](.+)\[/bold\]", " ".join(text.split()))
    return f"    {example.group(1)}" if example else _wrapped(_plain(text))


def _plain(text: str) -> str:
    """Help without terminal markup; placeholders such as <name> are escaped for HTML."""
    return " ".join(re.sub(r"\[/?bold\]", "`", text).replace("\\[", "[").replace("<", "\\<").split())


def main() -> None:
    """Write the pages."""
    for name, page in pages().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
