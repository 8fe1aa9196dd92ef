"""The public keys that an auditor has of a run's processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmq.audit.signature_checks import SignedLog
from fedmq.wire.key_requests import read_request
from fedmq.wire.keys import former_keys, load_accepted, private_names


@dataclass(frozen=True)
class KnownKeys:
    """Public keys by the name of their process, each as 64 hexadecimal digits.

    Args:
        accepted: the accepted keys.
        former: keys that were accepted before they were replaced or removed.
    """

    accepted: Mapping[str, str]
    former: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> KnownKeys:
        """Read a folder of keys.

        A process that made its own key in this folder, as the coordinator does, is known by its request.

        Raises:
            InputError: the folder has no accepted keys, or a file is damaged.
        """
        accepted = {name: key.public_bytes_raw().hex() for name, key in load_accepted(directory).items()}
        own = {name: directory / f"{name}.request" for name in private_names(directory)}
        made = {name: read_request(path).key for name, path in own.items() if name not in accepted and path.is_file()}
        former = {
            name: frozenset(key.public_bytes_raw().hex() for key in keys) - {accepted.get(name, "")}
            for name, keys in former_keys(directory).items()
        }
        return cls({**made, **accepted}, former)

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
