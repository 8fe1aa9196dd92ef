"""The silo program: receives tasks, trains and replies."""
