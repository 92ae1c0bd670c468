"""Evaluations: every claim measured beside its baselines, results written as files."""
