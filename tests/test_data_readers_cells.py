"""Captions and labels in one cell of a table: lists are read or refused, never taken for one label."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmq.data.labels import one_spelling
from fedmq.data.readers.cells import captions_of, labels_of, one_label
from fedmq.errors import InputError
from tests import data_set_folders
from tests.read_data_sets import labels_of as labels_of_row
from tests.read_data_sets import read

LABELS = [
    ("dog|sky", ["dog", "sky"]),
    ("['dog', 'sky']", ["dog", "sky"]),
    ('["dog", "sky"]', ["dog", "sky"]),
    ("('dog', 'sky',)", ["dog", "sky"]),
    ("{'dog'}", ["dog"]),
    ("[1, 2]", ["1", "2"]),
    ("[]", []),
    ("", [""]),
    ("nan", []),
    ("dog|nan", ["dog"]),
    ("hot dog", ["hot dog"]),
    ("shoes, boots|", ["shoes, boots", ""]),
    ('["it\'s", "a \\"b\\""]', ["it's", 'a "b"']),
]


@pytest.mark.parametrize(("cell", "labels"), LABELS)
def test_labels_separated_by_bars_and_lists_of_labels_are_read(cell: str, labels: list[str]) -> None:
    assert labels_of("here", cell) == labels


@pytest.mark.parametrize(
    "cell",
    ["dog,sky", "dog; sky", "dog\nsky", "['dog' 'sky']", "['dog', sky]", "[dog, sky]", "{'dog': 1}", "['dog'", "[1 2]",
     "dog\uff0csky", "dog\u3001sky", "dog\uff1bsky", "<dog><sky>", "[b'dog', b'sky']", "b'dog'",
     "array(['dog'])", "Index(['dog'], dtype='object')", "['dog', nan]", "[['dog'], ['sky']]", "['dog', '\\x']"],
)  # fmt: skip
def test_cells_that_look_like_several_labels_but_cannot_be_read_are_refused(cell: str) -> None:
    with pytest.raises(InputError, match=r"^here: found "):
        labels_of("here", cell)


def test_captions_may_hold_commas_and_brackets_but_lists_of_them_are_read() -> None:
    assert captions_of("here", "a dog, a cat; [laughs] (loudly)") == ["a dog, a cat; [laughs] (loudly)"]
    assert captions_of("here", "[laughs] a man") == ["[laughs] a man"]
    assert captions_of("here", "[applause]") == ["[applause]"]
    assert captions_of("here", "['a, dog', \"it's\"]") == ["a, dog", "it's"]
    assert captions_of("here", "nan") == []
    for cell in ("['a dog' 'a cat']", "b'a dog'", "[b'a dog', b'a cat']"):
        with pytest.raises(InputError, match="list of quoted texts"):
            captions_of("here", cell)


@given(st.lists(st.text(st.characters(exclude_categories=["C"]), min_size=1)))
def test_every_list_that_python_or_json_writes_is_read(labels: list[str]) -> None:
    assert labels_of("here", str(labels)) == labels
    assert labels_of("here", json.dumps(labels)) == labels
    assert captions_of("here", str(labels)) == labels


@given(
    st.lists(st.text("ab cd", min_size=1).map(str.strip).filter(bool), min_size=2, max_size=4), st.sampled_from(",;")
)
def test_several_words_with_another_separator_are_never_one_label(labels: list[str], separator: str) -> None:
    with pytest.raises(InputError, match="separated by"):
        labels_of("here", f"{separator} ".join(labels))
    with pytest.raises(InputError, match="a list"):
        one_label("here", f"{separator} ".join(labels))


def test_whole_numbers_with_and_without_decimals_are_one_label() -> None:
    assert one_spelling([("1",), ("1.0",), ("2.0", "dog"), ("2.5",), ("01",)]) == [
        ("1",), ("1",), ("2.0", "dog"), ("2.5",), ("01",)
    ]  # fmt: skip


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1), st.text(" \t\xa0\u3000", min_size=1))
def test_labels_that_differ_only_in_spaces_or_forms_of_characters_are_one(word: str, space: str) -> None:
    forms = [unicodedata.normalize(form, f"{word}{space}{word}") for form in ("NFC", "NFD")]
    several = [*forms, f"{word} {word}", f" {forms[1]}{space}"]
    found = one_spelling([(each,) for each in several])
    assert len(set(found)) == 1 and found[0][0] in several
    assert one_spelling([("Dog",), ("dog",)]) == [("Dog",), ("dog",)]


def test_a_column_of_numbers_that_pandas_wrote_with_gaps_has_the_labels_it_had_before(tmp_path: Path) -> None:
    path = data_set_folders.write(tmp_path / "list.csv", "image,caption,labels\na,b,1\nc,d,1.0\ne,f,nan\ng,h,2.0\n")
    found = read("manifest", path)
    assert found.label_names == ("1", "2.0")
    assert [labels_of_row(found, row) for row in range(4)] == [["1"], ["1"], [], ["2.0"]]


@pytest.mark.parametrize("labels", ['"dog,sky"', '"dog|sky"', "\"['dog', 'sky']\"", "[\"['dog', 'sky']\"]", '"[dog]"'])
def test_texts_of_json_that_hold_several_labels_are_refused(tmp_path: Path, labels: str) -> None:
    path = data_set_folders.write(tmp_path / "list.jsonl", f'{{"image": "a", "labels": {labels}}}\n{{"image": "b"}}')
    with pytest.raises(InputError, match="line 1: labels"):
        read("manifest", path)


def test_a_list_of_json_may_hold_labels_with_commas(tmp_path: Path) -> None:
    path = data_set_folders.write(tmp_path / "l.jsonl", '{"image": "a", "labels": ["shoes, boots"]}\n{"image": "b"}')
    assert read("manifest", path).label_names == ("shoes, boots",)
