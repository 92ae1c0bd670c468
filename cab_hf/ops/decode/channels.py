"""Channels of a key that the decode index contains, as arguments of kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Halves(NamedTuple):
    """Scored channels as two runs of adjacent channels of one size.

    Attributes:
        first: First channel of the first run.
        step: Distance from the start of the first run to the start of the second.
        size: Channels per run.
    """

    first: int
    step: int
    size: int

    @classmethod
    @lru_cache
    def of(cls, channels: tuple[int, ...], dim: int) -> Halves:
        """Return the runs for `LayerContext.channels`, () for all ``dim``; cached for all layers.

        A single run is cut into halves. The last channel of an odd count is dropped.

        Raises:
            ValueError: If channels are neither one run nor two runs of one size.
        """
        channels = channels or tuple(range(dim))
        first, size = channels[0], len(channels) // 2
        halves = cls(first, channels[size] - first, size)
        runs = (*range(first, first + size), *range(channels[size], channels[size] + size))
        one_run = tuple(range(first, first + len(channels)))
        if channels not in (runs, one_run) or channels[-1] >= dim:
            raise ValueError(
                f"channels must be one run of adjacent channels below {dim}, or two runs of one "
                f"size, got {channels}. Use () for all channels."
            )
        return halves

    @property
    def constants(self) -> dict[str, int]:
        """Runs as arguments of kernels."""
        return {"FIRST": self.first, "STEP": self.step, "SIZE": self.size}
