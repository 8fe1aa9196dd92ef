"""The transport that CONTRIBUTING.md prints, registered in this process; it knows nothing of ZeroMQ."""

from __future__ import annotations

from fedmq.wire.transports.registry import register
from tests.printed_code import CONTRIBUTING, file_under

exec(compile(file_under(CONTRIBUTING, "A transport"), CONTRIBUTING.name, "exec"), globals())
register("queue", globals()["TRANSPORT"])
