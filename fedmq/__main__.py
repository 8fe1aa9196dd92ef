"""What ``fedmq`` and ``python -m fedmq`` start.

Every process of a simulated run imports the module its starter was started with: here it finds next to nothing.
"""

from fedmq.launch.interrupts import answer_interrupts


def main() -> None:
    """Run the command line."""
    answer_interrupts()
    from fedmq.cli import main as cli  # noqa: PLC0415 - not in the processes of a run, and not before Ctrl-C is looked after

    cli.main()


if __name__ == "__main__":
    main()
