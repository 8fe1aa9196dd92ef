"""A rich console on which text of any origin cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fedmq.text import printable_lines


class SafeConsole(Console):
    """A console that escapes control characters in all text it is given: lines, cells, titles, live displays.

    Colours and movements of the cursor that rich makes itself are kept. Numbers and paths in text are not coloured.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Print as rich does; ``soft_wrap`` is for files, and a terminal gets lines broken between words."""
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Text with markup; escaped before its width is measured, so that tables stay aligned."""
        return super().render_str(printable_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The parts of a line; also those of text that did not come as a string."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=printable_lines(segment.text))
