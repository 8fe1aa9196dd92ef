"""The transport that docs/howto/extend prints, registered in this process; it knows nothing of ZeroMQ."""

from __future__ import annotations

from fedmq.wire.transports.registry import register
from tests.printed_code import file_under, recipe

exec(compile(file_under(recipe("A transport"), "A transport"), "docs/howto/extend", "exec"), globals())
register("queue", globals()["TRANSPORT"])
