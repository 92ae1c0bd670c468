"""Attention under a plan: the kernels of this package, and adapters to libraries."""
