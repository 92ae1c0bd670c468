"""Sparse decode steps of a model: the key index of a KV cache, and the steps that read it."""
