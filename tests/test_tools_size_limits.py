"""The check that modules, functions and test files stay short enough to read."""

from __future__ import annotations

from pathlib import Path

from tools.size_limits import too_long


def test_modules_functions_and_test_files_over_the_limit_are_named_with_their_lines(tmp_path: Path) -> None:
    body = "    x = 1\n"
    files = {
        "fedmq/long.py": "\n" * 501,
        "silos/just.py": "\n" * 500,
        "protocols/deep/functions.py": f"@f\ndef just():\n{body * 59}class A:\n  def more(self):\n{body * 60}",
        "tests/test_long.py": "\n" * 601 + f"def test():\n{body * 70}",
        "tests/test_just.py": "\n" * 600,
        "tools/long.py": "\n" * 9999,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(too_long(tmp_path)) == [
        "fedmq/long.py: 501 lines, at most 500",
        "protocols/deep/functions.py:63: more has 61 lines, at most 60",
        "tests/test_long.py: 672 lines, at most 600",
    ]
