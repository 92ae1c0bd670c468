"""Decode: one query a head against a long cache, of which it reads the keys that matter."""
