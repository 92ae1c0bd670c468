"""Attention under a plan: our own kernels, and those of the libraries."""
