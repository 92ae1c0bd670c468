"""Evaluations that compare CAB and other methods on the same inputs, and write results to files."""
