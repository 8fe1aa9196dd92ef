"""The public keys that an auditor has of a run's processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmq.audit.signature_checks import SignedLog
from fedmq.errors import InputError
from fedmq.wire.key_requests import known_keys
from fedmq.wire.keys import former_keys


@dataclass(frozen=True)
class KnownKeys:
    """Public keys by the name of their process, each as 64 hexadecimal digits.

    Args:
        accepted: the accepted keys, and those of the folder's own processes.
        former: keys that were accepted before they were replaced or removed.
    """

    accepted: Mapping[str, str]
    former: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> KnownKeys:
        """Read a folder of keys.

        A process that made its own key in this folder, as the coordinator does, is known by that key.

        Raises:
            InputError: the folder has no keys, or a file is damaged.
        """
        accepted = {name: key.public_bytes_raw().hex() for name, key in known_keys(directory).items()}
        former = {
            name: frozenset(key.public_bytes_raw().hex() for key in keys) - {accepted.get(name, "")}
            for name, keys in former_keys(directory).items()
        }
        return cls(accepted, former)

    def require_any(self, logs: Collection[str], directory: object) -> None:
        """Refuse a folder that has no key of any of the processes.

        Raises:
            InputError: see above.
        """
        if not self.all.keys() & set(logs):
            wanted = "a folder with public keys of the run's processes"
            raise InputError(str(directory), f"no key of any of {', '.join(sorted(logs))}", wanted)

    @property
    def all(self) -> dict[str, frozenset[str]]:
        """Accepted and former keys."""
        found = {name: frozenset({key}) for name, key in self.accepted.items()}
        return {
            name: found.get(name, frozenset()) | self.former.get(name, frozenset()) for name in {*found, *self.former}
        }

    def signed_with_former(self, logs: Mapping[str, SignedLog]) -> tuple[str, ...]:
        """Processes whose logs are signed, at least in part, with a key that is no longer accepted, sorted."""
        return tuple(sorted(name for name, log in logs.items() if self.former.get(name, frozenset()) & {*log.keys}))
