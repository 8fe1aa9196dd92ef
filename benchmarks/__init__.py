"""Measurements: what messages, rounds, starting up and the whole loop cost on this machine. Nothing is asserted.

Run all of them with ``python -m benchmarks`` (``make bench``), some with ``python -m benchmarks --only delta,rounds``.
"""
