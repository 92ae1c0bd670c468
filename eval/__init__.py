"""Evaluations: CAB and its baselines under the same conditions, with results as files."""
