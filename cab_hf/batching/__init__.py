"""Continuous batching of transformers for models with the attention of this package.

* `batch` computes attention over the sequences of a forward pass.
* `hooks` wraps functions of transformers.
* `scheduler` ends chunks of prompts at boundaries of query blocks.
* `served` decides which models continuous batching supports.
* `support` contains functions that `hooks` and `served` share.
"""
