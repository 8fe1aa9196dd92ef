"""Benchmarks: cost of messages, rounds, start-up and complete runs on this machine. Nothing is asserted.

Run all of them with ``python -m benchmarks`` (``make bench``), some with ``python -m benchmarks --only delta,rounds``.
"""
