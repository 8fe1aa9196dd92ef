"""The coordinator program: the rounds machine (no I/O) and its loop (only I/O)."""
