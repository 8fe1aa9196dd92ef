"""The silo program: receive a task, train, reply."""
