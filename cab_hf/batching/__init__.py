"""Continuous batching of transformers for models with the attention of this package.

* `batch` computes attention over the sequences of a forward pass.
* `hooks` wraps functions of transformers.
* `scheduler` ends chunks of prompts at boundaries of query blocks.
* `served` says which models are served.
* `support` has facts about transformers and models that `hooks` and `served` read.
"""
