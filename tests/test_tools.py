"""The static checks of ``tools``: what they find in modules, functions, imports and documents."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedmq
from tools import document_checks, make_reference, make_results
from tools.import_circles import circle, imports
from tools.size_limits import too_long


def test_a_circular_import_of_any_length_is_named() -> None:
    assert sorted(set(circle({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str]()}))) == ["a", "b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}) == []
    found = imports()
    assert "fedmq.data.raw_set" in found["fedmq.data.catalogue"]  # under TYPE_CHECKING
    assert "fedmq.models.clip_two_tower" in found["fedmq.models.build"]  # in a function


def test_every_public_name_of_the_package_is_imported_when_it_is_used() -> None:
    assert [name for name in fedmq.__all__ if not hasattr(fedmq, name)] == []


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


def test_a_page_with_a_broken_link_a_missing_file_a_long_line_or_another_word_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A title\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-title) [b](other.md#b) [c](gone.md)\n`fedmq/gone.py`\n" + "x" * 121 + "\nPictures\n"
    )
    assert list(document_checks.page_problems(page, tmp_path)) == [
        "line 3: 121 characters",
        "line 4: say image",
        "no file fedmq/gone.py",
        "no target of the link other.md#b",
        "no target of the link gone.md",
    ]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("scenario scenarios/smoke.yaml --set rounds=2", None),
        ("keys new silo-00 --keys keys", None),
        ("scenaro x.yaml", "no command scenaro"),
        ("scenario x.yaml --sed 1", "no option --sed"),
        ("scenario x.yaml --seed", "--seed without a value"),
        ("scenario scenarios/gone.yaml", "no file scenarios/gone.yaml"),
        ("preflight", "0 arguments"),
        ("coordinator x.yaml", "without --keys"),
    ],
)
def test_a_printed_command_is_one_of_the_program(command: str, problem: str | None) -> None:
    assert document_checks.command_problem(command, make_reference.commands()) == problem


def test_printed_yaml_fits_the_schema_of_a_file() -> None:
    text = "words\n\n    rounds: 3\n    seed: 1\n\nmore\n\n```yaml\nroundz: 3\n```\n"
    blocks = list(document_checks.yaml_blocks(text))
    assert [(line, document_checks.yaml_problem(block)) for line, block in blocks] == [
        (3, None),
        (8, "roundz are keys of no file"),
    ]
    assert "many" in str(document_checks.yaml_problem({"rounds": "many"}))


def test_a_page_shows_the_columns_and_rows_that_it_names_and_recall_over_the_merges() -> None:
    cells = [("fedavg", "0.1230 ± 0.0010", "-", "a|b"), ("rcsr", "0.1000 ± 0.0010", "−0.0230", "learning_rate=0.0048")]
    kept = make_results.Kept.model_validate(
        {
            "command": "fedmq compare x.yaml --jobs 1 --json",
            "table": {
                "head": ["", "mean_r1", "difference", "chosen"],
                "body": [[{"text": text, "best": place == 1} for place, text in enumerate(row)] for row in cells],
                "notes": ["a < b"],
            },
            "runs": [
                {"name": name, "seed": seed, "course": [[0, 0.25], [5, 0.25 + seed / 4]]}
                for name, seed in (("rcsr", 0), ("rcsr", 1), ("fedavg", 1))
            ],
        }
    )
    whole = make_results.table(kept, [], [], short=False)
    assert "\n    fedmq compare x.yaml\n" in whole and "- a &lt; b\n" in whole
    assert "| fedavg | **.1230 ± .0010** | - | a\\|b |\n| rcsr | **.1000 ± .0010** | −.0230 | rate=.0048 |" in whole
    part = make_results.table(kept, ["mean_r1"], ["rcsr"], short=True)
    assert part.split("\n")[1:4] == [
        "|  | mean_r1 | difference |",
        "|---|---|---|",
        "| rcsr | **.1000 ± .0010** | −.0230 |",
    ]
    with pytest.raises(ValueError, match="no map in the result"):
        make_results.table(kept, ["map"], [], short=False)
    assert make_results.course(kept, [0, 5]).split("\n")[1:-2] == [
        "| merges | 0 | 5 |",
        "|---|---|---|",
        "| rcsr | .2500 ± .0000 | .3750 ± .1768 |",
        "| fedavg | .2500 | .5000 |",
    ]
    with pytest.raises(ValueError, match="rcsr was not evaluated after 7 merges"):
        make_results.course(kept, [7])
