"""Entry point of ``fedmq`` and ``python -m fedmq``.

Every process of a simulated run imports this module again, so it imports the command line only inside ``main``.
"""

import contextlib
import sys

from fedmq.launch.interrupts import FAILED, answer_interrupts, say_interrupted


def main() -> None:
    """Run the command line."""
    answer_interrupts()
    # A process that has torch was itself forked from a forkserver.
    if sys.argv[1:2] == ["scenario"] and not {"--check", "--help"} & {*sys.argv} and "torch" not in sys.modules:
        _warm_up()
    from fedmq.cli import main as cli  # noqa: PLC0415 - not in the processes of a run, and not before Ctrl-C is handled

    cli.main()


def _warm_up() -> None:
    """Start the forkserver while this process imports; where that fails, the command says so when it needs it."""
    try:
        from fedmq.errors import FedmqError  # noqa: PLC0415 - not in the processes of a run
        from fedmq.launch import forkserver  # noqa: PLC0415

        with contextlib.suppress(FedmqError, OSError):
            forkserver.warm_up("features")
    except KeyboardInterrupt:
        say_interrupted()
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
