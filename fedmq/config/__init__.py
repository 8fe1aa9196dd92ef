"""The scenario: its schema, its file, its faults, and the digest that names a run."""
