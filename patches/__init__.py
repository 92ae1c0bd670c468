"""Functions that switch CAB on and off in a loaded model, and show how each layer attends."""

from cab_hf.patches.inspection import describe, stats
from cab_hf.patches.switch import apply_cab, cab, remove_cab

__all__ = ["apply_cab", "cab", "describe", "remove_cab", "stats"]
