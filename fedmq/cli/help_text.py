"""Paragraphs of ``--help``: typer keeps the line ends of docstrings, which then break lines twice."""

from __future__ import annotations

import inspect

import typer


def join_lines(app: typer.Typer) -> None:
    """Make every paragraph of the help of all commands one line, which the terminal breaks to its width."""
    for command in app.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            join_lines(group.typer_instance)
