"""Entry point of ``fedmq`` and ``python -m fedmq``.

Every process of a simulated run imports this module again, so it imports the command line only inside ``main``.
"""

from fedmq.launch.interrupts import answer_interrupts


def main() -> None:
    """Run the command line."""
    answer_interrupts()
    from fedmq.cli import main as cli  # noqa: PLC0415 - not in the processes of a run, and not before Ctrl-C is handled

    cli.main()


if __name__ == "__main__":
    main()
