"""The layout of ``--help``: commands in groups, and paragraphs as one line each."""

from __future__ import annotations

import inspect

import typer

#: The groups of ``fedmq --help`` with their commands, both in order.
_GROUPS = {
    "Start here": ("init", "scenario", "report", "board", "search", "schema", "protocols", "losses", "data"),
    "Operate": ("preflight", "keys", "coordinator", "silo", "evaluator", "status", "prune"),
    "Audit and look": ("audit", "replay", "sign", "verify", "curves", "tsne", "export"),
    "Experiments": ("compare", "sweep", "tune"),
}


def group_commands(app: typer.Typer) -> None:
    """Show the commands of ``fedmq --help`` in groups; a command that is in none of them comes last."""
    places = {name: (place, title) for place, (title, name) in enumerate(_pairs())}
    for command in app.registered_commands:
        if command.name in places:
            command.rich_help_panel = places[command.name][1]
    for group in app.registered_groups:
        if group.name in places:
            group.rich_help_panel = places[group.name][1]
    app.registered_commands.sort(key=lambda entry: places.get(entry.name or "", (len(places), ""))[0])


def _pairs() -> list[tuple[str, str]]:
    return [(group, name) for group, names in _GROUPS.items() for name in names]


def join_lines(app: typer.Typer) -> None:
    """Make every paragraph of the help of all commands one line, which the terminal breaks to its width.

    Typer keeps the line ends of docstrings, which would break lines twice.
    """
    for command in app.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            join_lines(group.typer_instance)
