"""Checks of a finished run: message logs, policy, differential privacy, membership inference, replay."""
