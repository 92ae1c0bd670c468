"""Continuous batching by transformers, of a model whose attention is ours.

`batch` attends the sequences of a forward pass, `hooks` wraps transformers' functions.
"""
