"""Channels of a key that the decode index contains, as arguments of kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Halves(NamedTuple):
    """Scored channels as two runs of adjacent channels of one size.

    Attributes:
        first: First channel of the first run.
        distance: Channels from the start of the first run to the start of the second.
        size: Channels per run.
    """

    first: int
    distance: int
    size: int

    @classmethod
    @lru_cache
    def of(cls, channels: tuple[int, ...], dim: int) -> Halves:
        """Return the two runs of the scored channels; cached for all layers.

        A single run is cut into halves. The last channel of an odd count is dropped.

        Args:
            channels: `LayerContext.channels`; () for all.
            dim: Channels per head.

        Raises:
            ValueError: If channels are neither one run nor two runs of one size.
        """
        channels = channels or tuple(range(dim))
        first, size = channels[0], len(channels) // 2
        second = channels[size]
        two_runs = (*range(first, first + size), *range(second, second + size))
        one_run = tuple(range(first, first + len(channels)))
        if channels not in (two_runs, one_run) or channels[-1] >= dim:
            raise ValueError(
                f"channels must be one run of adjacent channels below {dim}, or two runs of one "
                f"size, got {channels}. Use () for all channels."
            )
        return cls(first=first, distance=second - first, size=size)

    @property
    def constants(self) -> dict[str, int]:
        """The runs as constant arguments of kernels."""
        return {
            "FIRST_CHANNEL": self.first,
            "HALF_DISTANCE": self.distance,
            "HALF_SIZE": self.size,
        }
