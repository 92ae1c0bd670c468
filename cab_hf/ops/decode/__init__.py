"""Decode: one query a head against a long cache, of which it reads the keys that matter."""

from cab_hf.ops.decode.reference import Choice, attend, choose, index_keys

__all__ = ["Choice", "attend", "choose", "index_keys"]
