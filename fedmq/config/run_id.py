"""The id of a run, a digest of its scenario without machine-dependent keys, and the keys in which two runs differ.

Scenarios are compared by salted digests of their values, which show no value.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from fedmq.storage.json_files import Digest, Stored
from fedmq.text import first_few

#: Keys that depend on the machine and do not enter the id: whole keys, or the listed keys of a section.
_MACHINE_KEYS: Mapping[str, tuple[str, ...]] = {
    "device": (),
    "launcher": (),
    "track": (),
    "wire": (),
    "data": ("path", "annotations", "images"),
    "silos": ("slots", "hosts", "needs"),
    "participation": ("trace", "minimum"),
    "aggregation": ("task_limit",),
    "evaluation": ("keep",),
}


def without_machine(plain: Mapping[str, object]) -> dict[str, object]:
    """A complete scenario as plain data, without the keys that depend on the machine."""
    facts = {key: value for key, value in plain.items() if _MACHINE_KEYS.get(key, ("",)) != ()}
    for key, names in _MACHINE_KEYS.items():
        part = facts.get(key)
        if names and isinstance(part, Mapping):
            facts[key] = {name: value for name, value in part.items() if name not in names}
    return facts


def facts_of(plain: Mapping[str, object]) -> dict[str, object]:
    """The part of a complete scenario, as plain data, that identifies a run."""
    facts = without_machine(plain)
    training = facts.get("training")
    if isinstance(training, Mapping):
        # A run that is extended by further rounds stays the same run.
        facts["rounds"] = training.get("schedule_rounds") or facts.get("rounds")
        facts["training"] = {name: value for name, value in training.items() if name != "schedule_rounds"}
    return facts


def name_of(plain: Mapping[str, object]) -> str:
    """The run's id on the wire: equal for equal scenarios, regardless of the machine and the paths of files."""
    return f"{plain.get('name')}-{digest_of(plain)[:12]}"


def folder_of(run: str, log: str) -> str:
    """Folder of a standing silo for a run."""
    return f"{run}-{log[:8]}"


def digest_of(plain: Mapping[str, object]) -> str:
    """SHA-256 (hex) of a scenario, of which the run's id has the first 12 digits."""
    return hashlib.sha256(json.dumps(facts_of(plain), sort_keys=True, default=str).encode()).hexdigest()


def flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, keys joined by dots as ``--set`` takes them; an empty mapping is a value."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(inner, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


#: A key with its section, or a key without one.
_KEY = re.compile(r"[A-Za-z0-9_-]{1,48}(\.[A-Za-z0-9_-]{1,48})?")
_Key = Annotated[str, Field(pattern=f"^{_KEY.pattern}$")]
#: Maximum number of keys that are compared, and of those that are named in a message or a line.
_MOST_KEYS, MOST_NAMED = 1000, 8


class KeyDigests(Stored):
    """Digests of a scenario's values, for those who have the scenario to compare with theirs."""

    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # 32 hexadecimal digits, new for each answer
    # Digest of each value by its key, such as ``seed`` and ``training.learning_rate``.
    keys: Annotated[dict[_Key, Digest], Field(max_length=_MOST_KEYS)]

    @classmethod
    def of(cls, scenario: Mapping[str, object], salt: bytes) -> KeyDigests:
        """The digests of a complete scenario without its machine-dependent keys; the salt has 16 random bytes."""
        digests = ((key, _digest(salt, key, value)) for key, value in _values(facts_of(scenario)))
        return cls(salt=salt.hex(), keys=dict(sorted(digests)[:_MOST_KEYS]))

    def differing(self, scenario: Mapping[str, object]) -> tuple[str, ...]:
        """Keys of which another scenario has another value or none, and those that only it has, in order."""
        other = KeyDigests.of(scenario, bytes.fromhex(self.salt)).keys
        return tuple(sorted(key for key in {*self.keys, *other} if self.keys.get(key) != other.get(key)))


def named(keys: tuple[str, ...]) -> str:
    """Differing keys in one line, of which the first few are named."""
    return first_few(keys, MOST_NAMED)


def keys_in(text: str) -> tuple[str, ...] | None:
    """The keys that a peer lists, separated by line feeds; None if the text is anything else."""
    keys = tuple(text.split("\n"))
    return keys if len(keys) <= MOST_NAMED and all(map(_KEY.fullmatch, keys)) else None


def _values(facts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """All values with their keys; a section with keys of another form than expected is one value."""
    for name, value in facts.items():
        keys = [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else []
        if isinstance(value, Mapping) and keys and all(map(_KEY.fullmatch, keys)):
            yield from zip(keys, value.values(), strict=True)
        elif _KEY.fullmatch(name):
            yield name, value


def _digest(salt: bytes, key: str, value: object) -> str:
    content = json.dumps([key, value], sort_keys=True, default=str)
    return hashlib.sha256(salt + content.encode()).hexdigest()
