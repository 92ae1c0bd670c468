"""Sparse decode steps of a model: the cache that keeps a key index, and the step that reads it."""
