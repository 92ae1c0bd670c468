"""Turning CAB on and off on a loaded model, and seeing what it does there."""

from cab_hf.patches.inspection import describe, stats
from cab_hf.patches.switch import apply_cab, cab, remove_cab

__all__ = ["apply_cab", "cab", "describe", "remove_cab", "stats"]
