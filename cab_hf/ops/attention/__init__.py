"""Attention over the key blocks that a plan lists, by Triton kernels and by attention libraries."""
