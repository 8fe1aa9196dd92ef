"""The coordinator program: a rounds state machine without I/O, and the loop that performs its I/O."""
