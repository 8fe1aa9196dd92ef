"""Importing this module makes a process wait for no disk: no test can cut the power, and each file takes 5 ms."""

import os

os.fsync = lambda _: None  # type: ignore[assignment]
