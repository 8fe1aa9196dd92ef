"""Data sets: reading, preparing, splitting and partitioning them."""
