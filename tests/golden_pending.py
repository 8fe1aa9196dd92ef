"""Golden values that nothing in the project computes yet, with the reason; the one list of them.

Whoever builds the method takes its keys out of here and adds them to a test_golden module. test_golden_coverage.py
fails for a key that is in neither place, or in both.
"""

from __future__ import annotations

#: file -> reason why none of its keys is checked.
FILES: dict[str, str] = {}

#: file -> key -> reason.
KEYS: dict[str, dict[str, str]] = {}
