"""Check that the documents agree with the code and with each other; part of ``make static``.

Links, anchors and named files exist; printed commands have these options; printed YAML fits a schema; generated pages
are up to date; pages are short and listed where a reader looks for them.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from pydantic import ValidationError

import protocols
from fedmq.audit.policy import Policy
from fedmq.cli import key_reference
from tools import make_reference, make_results

ROOT = Path(__file__).parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "scenarios/**/*.md", "fedmq/**/*.md")
#: A command in a block of code, on one or several lines.
PRINTED = re.compile(r"^ {4}(?:\$ )?(?:\.venv/bin/)?fedmq ((?:.*\\\n)*.*)$", flags=re.MULTILINE)
#: Words that have a better one in this project.
WORDS = {r"\bpictures?\b": "image"}
#: Hosts of registries, and paths that only one machine has.
ELSEWHERE = re.compile(
    r"pypi\.org/sim"
    r"ple|python"
    r"hosted|download\.py"
    r"torch|registry\.np"
    r"mjs|deb\.deb"
    r"ian|/wor"
    r"k/|/opt/py"
    r"pi"
)
_LINE, _CELL = 120, 100  # longest line, and longest cell of a table [characters]
_README, _RESULTS, _CONTRIBUTING = 102, 120, 5000  # most lines, lines and bytes of these pages


def pages(root: Path = ROOT) -> list[Path]:
    """All pages, sorted."""
    return sorted(path for pattern in PATTERNS for path in root.glob(pattern))


def printed(page: Path) -> list[str]:
    """The commands that a page prints, without ``fedmq``, each on one line."""
    return [command.replace("\\\n", " ") for command in PRINTED.findall(page.read_text(encoding="utf-8"))]


def anchors(page: Path) -> set[str]:
    """What a link may name behind ``#``: the headings, as GitHub makes names of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def page_problems(page: Path, root: Path = ROOT) -> Iterator[str]:
    """What is wrong with the text and the links of one page."""
    text = page.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _LINE:
            yield f"line {number}: {len(line)} characters"
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if any(len(cell) > _CELL or re.search(r"\. [A-Z]", cell) for cell in cells):
            yield f"line {number}: a paragraph in a cell"
        yield from (
            f"line {number}: say {word}" for wrong, word in WORDS.items() if re.search(wrong, line, re.IGNORECASE)
        )
    to_be_made = re.findall(r"A new file, `(\S+)`:", text)
    for name in re.findall(r"`((?:fedmq|protocols|tests|tools|docs|coordinator|silos|scenarios)/[\w/.]+\.\w+)`", text):
        if "mine" not in name and name not in to_be_made and not (root / name).exists():
            yield f"no file {name}"
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"no target of the link {link}"


def command_problem(command: str, known: dict[str, Any], root: Path = ROOT) -> str | None:
    """Why a printed command is none of the program; None if it is one."""
    words = [word for word in shlex.split(command, comments=True) if word != "&"]
    if words in (["--help"], ["--install-completion"]):
        return None
    size = 2 if " ".join(words[:2]) in known else 1
    if (name := " ".join(words[:size])) not in known:
        return f"no command {name}"
    parameters = known[name].params
    options = {option: parameter for parameter in parameters for option in parameter.opts if option.startswith("-")}
    values, given, rest = [], set[str](), iter(words[size:])
    for word in rest:
        if not word.startswith("--"):
            values.append(word)
        elif word not in options:
            return f"no option {word}"
        else:
            given.add(word)
            if not options[word].is_flag and next(rest, "--").startswith("--"):
                return f"{word} without a value"
    arguments = [parameter for parameter in parameters if not parameter.opts[0].startswith("-")]
    least = sum(argument.required for argument in arguments)
    if not least <= len(values) <= sum(1 if argument.nargs == 1 else 99 for argument in arguments):
        return f"{len(values)} arguments"
    if missing := {option for option, parameter in options.items() if parameter.required} - given:
        return f"without {', '.join(missing)}"
    files = [value for value in values if value.startswith(("scenarios/", "docs/")) and not (root / value).exists()]
    return f"no file {files[0]}" if files else None


def yaml_blocks(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The blocks of code that are YAML mappings with words as keys, each with the number of its first line."""
    for match in re.finditer(r"^```.*\n((?:.*\n)*?)^ *```|(?<=\n\n)((?: {4}.*\n|\n(?= {4}))+)", text, re.MULTILINE):
        try:
            value = yaml.safe_load(match[1] or match[2])
        except yaml.YAMLError:
            continue
        if isinstance(value, dict) and all(re.fullmatch(r"[a-z_]+", str(key)) for key in value):
            yield text.count("\n", 0, match.start()) + 1, value


def yaml_problem(block: dict[str, Any]) -> str | None:
    """Why a mapping is valid in no file of a user; None if it is."""
    if block.keys() <= Policy.model_fields.keys():
        try:
            Policy.model_validate(block)
        except ValidationError as error:
            return f"no policy: {error.errors()[0]['msg']}"
        return None
    problems = []
    for path in sorted((ROOT / "docs" / "reference" / "schemas").glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        schema.pop("required", None)
        if block.keys() <= schema["properties"].keys():
            problem = next(jsonschema.Draft202012Validator(schema).iter_errors(block), None)
            if problem is None:
                return None
            problems.append(f"no {path.stem} file: {problem.message}")
    return "; ".join(problems) or f"{', '.join(block)} are keys of no file"


def list_problems() -> Iterator[str]:
    """What is missing in the lists of pages, scenarios, comparisons, packages and commands."""
    docs, index = ROOT / "docs", ROOT / "docs" / "README.md"
    links = re.findall(r"\]\(([^)]+)\)", index.read_text(encoding="utf-8"))
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links}
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    for page in docs.rglob("*.md"):
        name = page.relative_to(docs).as_posix()
        if page.parent.name in ("tutorial", "howto", "reference", "explanation") and page.resolve() not in linked:
            yield f"docs/README.md: no link to {name}"
        if name not in listed:
            yield f"mkdocs.yml: {name} is not in the navigation"
    named = set(re.findall(r"`(\w+\.yaml)`", (ROOT / "scenarios" / "README.md").read_text(encoding="utf-8")))
    for name in {path.name for path in (ROOT / "scenarios").glob("*.yaml")} ^ named:
        yield f"scenarios/README.md: {name} is only there, or not there"
    commands = [command for page in (ROOT / "scenarios").glob("*/README.md") for command in printed(page)]
    for path in (ROOT / "scenarios").glob("*/tables/*.yaml"):
        uses = [command for command in commands if path.relative_to(ROOT).as_posix() in shlex.split(command)]
        if len(uses) != 1:
            yield f"{path.relative_to(ROOT)}: {len(uses)} commands in the README of its paper"
    contributing, makefile = (ROOT / name for name in ("CONTRIBUTING.md", "Makefile"))
    text = contributing.read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):.*", makefile.read_text(encoding="utf-8"), flags=re.MULTILINE))
    if targets - {"run", "static", "clean"} != set(re.findall(r"^    make (\w+) ", text, flags=re.MULTILINE)):
        yield "CONTRIBUTING.md: other commands than the Makefile's"
    layers = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\nlayers = [\n")[2].partition("\n]")[0]
    rows = [sorted(name.strip().replace(".", "/") for name in row.split("|")) for row in re.findall(r'"(.+)"', layers)]
    table = [sorted(re.findall(r"`(.+?)`", row)) for row in re.findall(r"^\| (`.+?) \|", text, flags=re.MULTILINE)]
    if table[1:] != rows[-2:0:-1]:
        yield "CONTRIBUTING.md: its table of packages has not the layers of pyproject.toml in their order"


def size_problems() -> Iterator[str]:
    """Pages that are too long, keys without a meaning, and texts that belong to one machine."""
    for page in pages():
        most = {"README.md": _README}.get(page.relative_to(ROOT).as_posix(), 10**6)
        most = _RESULTS if page.parent.name == "results" else most
        if (lines := len(page.read_text(encoding="utf-8").splitlines())) > most:
            yield f"{page.relative_to(ROOT)}: {lines} lines, at most {most}"
    if (size := (ROOT / "CONTRIBUTING.md").stat().st_size) > _CONTRIBUTING:
        yield f"CONTRIBUTING.md: {size} bytes, at most {_CONTRIBUTING}"
    keys = [key for _, own in (*key_reference.parts().values(), *key_reference.faults().values()) for key in own]
    keys += [key for name in protocols.names() for key in key_reference.options(protocols.load(name).Options)]
    keys += [key for name in protocols.losses() for key in key_reference.loss(protocols.loss(name))]
    for key in keys:
        if len(key.meaning) < 4 or not key.values or "anything" in key.values:
            yield f"{key.name}: no meaning or no values"
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        if any(cell.get("outputs") or cell.get("execution_count") for cell in cells):
            yield f"{notebook.name}: a cell with outputs"
    folders = [folder for folder in ROOT.glob("[a-z]*/") if folder.name not in ("runs", "build", "dist", "site")]
    for path in [path for folder in folders for path in folder.rglob("*")] + list(ROOT.glob("*")):
        text = path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".env", ".service"} and path.is_file()
        if text and ELSEWHERE.search(path.read_text(encoding="utf-8", errors="replace")):
            yield f"{path.relative_to(ROOT)}: a host of a registry, or a path of one machine"


def problems() -> Iterator[str]:
    """Every problem, one line each."""
    known = make_reference.commands()
    for page in pages():
        name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
        yield from (f"{name}: {problem}" for problem in page_problems(page))
        for command in printed(page) if page.parent.name != "reference" else ():  # which prints patterns of commands
            if (problem := command_problem(command, known)) is not None:
                yield f"{name}: fedmq {command}: {problem}"
        for line, block in yaml_blocks(text) if re.match(r"docs/(?!results/|howto/extend/)", name) else ():
            if (problem := yaml_problem(block)) is not None:
                yield f"{name}:{line}: {problem}"
    for name, made in make_reference.pages().items():
        if (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") != made:
            yield f"docs/reference/{name}: python -m tools.make_reference writes it anew"
    for page, made in make_results.pages().items():
        if page.read_text(encoding="utf-8") != made:
            yield f"{page.relative_to(ROOT)}: python -m tools.make_results updates its tables"
    yield from list_problems()
    yield from size_problems()


if __name__ == "__main__":
    wrong = list(problems())
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(1 if wrong else 0)
