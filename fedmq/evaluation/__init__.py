"""Metrics, and the evaluator program that measures them."""
