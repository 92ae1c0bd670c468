"""Texts with something hidden in them, and questions about it."""
