"""Nothing that is printed or logged controls a terminal, whatever names, labels, paths and error texts contain."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fedmq.audit import policy
from fedmq.audit.findings import Cause, Finding
from fedmq.audit.log_checks import Audit
from fedmq.audit.report import Verdict
from fedmq.cli import main, operate, terminal
from fedmq.cli.audit import print_audit
from fedmq.cli.compare import display_progress
from fedmq.cli.console import bar
from fedmq.cli.data import show_data
from fedmq.cli.search import hits_table
from fedmq.errors import InputError
from fedmq.experiments.process_pool import JobProgress
from fedmq.launch.data_check import DataFacts, SiloData
from fedmq.retrieval.search import Hit
from fedmq.runs.run_records import UnusableReplies
from fedmq.runs.status import SiloPhase, SiloStatus, Status, StatusFile
from fedmq.safe_console import SafeConsole
from fedmq.storage.logs import LogFormat, LogLevel, LogOptions, open_log
from fedmq.storage.run_folder import RunFolder
from fedmq.text import json_text, print_json, print_line, print_traceback, printable
from fedmq.wire.message_log import MessageLog
from tests.run_summaries import summary
from tests.threaded_run import resolved

#: Clears the screen, sets the title, colours (also by a C1 character), rewrites the line, turns the direction of text.
ATTACKS = (
    *("\x1b[2J", "\x1b]0;title\x07", "\x1b[31m", "\x9b31m", "\x9d0;title\x9c", "\r", "\b", "\x7f", "\x85", "\u2028"),
    *("\u202e", "\u2066", "\u200b", "\ufeff", "\udcff", "\x00", "\x1bP$q\x1b\\", "\x1b[6n"),
)
hostile = st.lists(st.one_of(st.sampled_from(ATTACKS), st.text(max_size=5), st.sampled_from(["[bold]", "[/", "\\"])))
hostile_text = st.builds("{}{}{}".format, hostile.map("".join), st.sampled_from(ATTACKS), hostile.map("".join))


def assert_harmless(output: str) -> None:
    wrong = {each for each in output if not (each.isprintable() or each in "\n\t")}
    assert not wrong, (wrong, output)


def printed(show: Callable[[], object]) -> str:
    """What a function writes to standard output and standard error."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        show()
    return written.getvalue()


def on_console(show: Callable[[SafeConsole], object], *, terminal_of: bool = False) -> str:
    screen = io.StringIO()
    show(SafeConsole(file=screen, width=100, force_terminal=terminal_of))
    return screen.getvalue()


@pytest.mark.slow
@given(hostile_text)
@settings(max_examples=40)
def test_text_is_escaped_in_one_way_and_nothing_else_of_it_changes(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert json.loads(json_text({text: [text]}, ascii_only=False)) == {text: [text]}
    for show in (
        lambda: print_line(text),
        lambda: print_line(text, error=True),
        lambda: print_json({text: text}),
        lambda: print_json({text: text}, ascii_only=False),
    ):
        assert_harmless(printed(show))


def test_ordinary_text_of_every_script_stays_as_it_is() -> None:
    for text in ("Schnee über Köln", "雪の中の犬", "собака на снегу", "\N{DOG FACE} é", "a/b c.png"):
        assert printable(text) == text
    assert printable("a\u3000b\xa0c") == "a b c"
    assert printable("\x1b[2J\n\u202e") == "\\x1b[2J\\n\\u202e"


@given(hostile_text)
@settings(max_examples=20, deadline=None)
def test_every_kind_of_rich_output_is_harmless(text: str) -> None:
    table = Table("a", title=Text(text))
    table.add_row(Text(text))
    for shown in (text, Text(text), Text(text, style="red"), Panel(Text(text)), table):
        assert_harmless(on_console(lambda console, it=shown: console.print(it, markup=False)))  # type: ignore[misc]
    assert_harmless(on_console(lambda console: console.print(text, markup=False, soft_wrap=True, style="red")))

    def live(console: SafeConsole) -> None:
        with Live(Text(text), console=console, auto_refresh=False) as shown:
            shown.update(table, refresh=True)
            console.print(text, markup=False)

    # On a terminal rich itself moves the cursor and sets colours; the text's own sequences are gone.
    found = on_console(live, terminal_of=True)
    assert_harmless(re.sub(r"\x1b\[(\?25[lh]|\d*[AK]|[\d;]*m)|\r", "", found))
    assert "\x1b[2J" not in found and "\x1b[6n" not in found


@given(hostile_text | st.text(alphabet="a\n\r\t\v", min_size=1), hostile_text)
@settings(max_examples=30)
def test_an_input_error_is_one_line_whatever_its_place_and_value(place: str, found: str) -> None:
    text = str(InputError(f"{place}.jsonl", found, f"a file like {place}"))
    assert text.isprintable() and text.endswith(f"allowed: a file like {printable(place)}")


def test_the_width_of_a_cell_is_that_of_its_escapes() -> None:
    table = Table("a")
    table.add_row("\x1b[2J")
    lines = on_console(lambda console: console.print(table)).splitlines()
    assert len(set(map(len, lines))) == 1 and "\\x1b[2J" in lines[3]


@given(hostile_text)
@settings(max_examples=10, deadline=None)
def test_every_command_s_output_is_harmless(text: str) -> None:
    name = text[:60]
    silo = SiloStatus(phase=SiloPhase.LOST, error=text)
    at = datetime.now(UTC).isoformat()
    status = StatusFile(
        run=text, written=at, phase="collecting", round=1, rounds=2, loss=None, metrics={}, up=0, down=0, now=0.0,
        elapsed=0.0, refused={text: 1}, last_refused=text, silos={name: silo},
    )  # fmt: skip
    assert_harmless(printed(lambda: operate._show(status, datetime.now(UTC))))

    audit = Audit(findings=[Finding(Cause.FILE, text, text)], written=(text,))
    audit.records[text], audit.refused[text][text], audit.payloads.bytes[text][text] = 1, 2, 3
    audit.payloads.number[text][text] = 1
    assert_harmless(on_console(lambda console: print_audit(audit, Verdict(text, text), console)))

    silos = {name: SiloData(("image",), 1, {text: 1}, 1)}
    names = (text,)
    facts = DataFacts(
        text, 1, 1, {"train": 1}, {text: 1}, 0, problems=names, missing=names, unreadable=names, silos=silos,
        without_captions=names, without_image=names, duplicates_of_training_items=names, duplicates_by_image=names,
        constant=names,
    )  # fmt: skip
    assert_harmless(printed(lambda: show_data(facts)))
    assert_harmless(on_console(lambda console: console.print(hits_table([Hit(1, 0.5, text, text)], binary=False))))

    unusable = UnusableReplies(refused=1, last=text)
    done = summary(scenario=text, personal_missing={name: text}, unusable_replies={"silo-00": unusable})
    done.per_silo["silo-00"] = done.per_silo["silo-00"].model_copy(update={"participations": 0})
    folder = RunFolder(Path(tempfile.gettempdir()) / "none")
    assert_harmless(on_console(lambda console: terminal.print_summary(done, folder, console)))

    def fail() -> None:
        with pytest.raises(SystemExit):
            main._fail(InputError(text, text, text), 2)

    assert_harmless(printed(fail))
    assert_harmless(printed(lambda: bar()(text, 1, 2)))

    def crash() -> None:
        try:
            raise ValueError(text)
        except ValueError:
            print_traceback(*sys.exc_info())  # type: ignore[arg-type]

    assert_harmless(printed(crash))


@given(hostile_text)
@settings(max_examples=10, deadline=None)
def test_progress_lines_are_harmless(text: str) -> None:
    screen = io.StringIO()
    console = SafeConsole(file=screen, width=100)
    with display_progress(console, quiet=False) as show:
        show(text, JobProgress(5, 12, (), None))
    assert_harmless(screen.getvalue())


def test_the_display_of_a_run_is_harmless(tiny: Path) -> None:
    text = "".join(ATTACKS)
    status = Status("gathering", 0, 4, 0, (text,), ({text: 1}, text), 2, 0, None, {}, 0, 0.0, 5.0, ((text, 40.0, 9.0),))

    def show(console: SafeConsole) -> None:
        with terminal.display(resolved(tiny), console, quiet=False) as update:
            update(status)
            update(replace(status, phase="collecting", overdue=(text,), elapsed=30.0))

    assert_harmless(on_console(show))
    found = on_console(show, terminal_of=True)
    assert_harmless(re.sub(r"\x1b\[(\?25[lh]|\d*[AK]|[\d;]*m)|\r", "", found))


@given(hostile_text)
@settings(max_examples=20, deadline=None)
def test_logs_for_operators_are_harmless_in_every_format(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for format_ in LogFormat:
            path = Path(folder) / format_
            log = open_log(LogOptions(LogLevel.DEBUG, path, format_, console=False), text)
            log.warning(text, path=Path(text.replace("\0", "")), names=[text, {text: text}], error=ValueError(text))
            assert_harmless(path.read_text(encoding="utf-8", errors="surrogateescape"))
            assert path.read_text().count("\n") == 1


def test_message_logs_are_ascii(tmp_path: Path) -> None:
    from fedmq.clock import WallClock
    from fedmq.wire.log_events import LogEvent

    with MessageLog(tmp_path / "log", "coordinator", WallClock()) as log:
        log.note(LogEvent.ERROR_REPORTED, peer="silo-00", error="".join(ATTACKS[:10]))
    assert_harmless((tmp_path / "log").read_text())


def test_findings_of_a_policy_are_harmless() -> None:
    found = policy.PolicyResult(Path("policy.yaml"), 0, 0, (), ("".join(ATTACKS),))
    assert_harmless(on_console(lambda console: policy.show(found, console)))
