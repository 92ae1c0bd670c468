"""Sparse decode in a model: the cache that keeps an index, and the step that reads it."""
