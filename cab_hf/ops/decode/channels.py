"""Scored channels: the channels of keys that the decode index contains, as arguments of kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Halves(NamedTuple):
    """Scored channels as two ranges of adjacent channels with the same size.

    Attributes:
        first: First channel of the first range.
        distance: First channel of the second range minus first channel of the first range.
        size: Number of channels of each range.
    """

    first: int
    distance: int
    size: int

    @classmethod
    @lru_cache
    def of(cls, channels: tuple[int, ...], dim: int) -> Halves:
        """Split the scored channels into two ranges.

        A single range is cut into halves. The last channel of an odd number is dropped. The result
        is cached, because all layers need the same ranges.

        Args:
            channels: `LayerContext.channels`, the indices of the scored channels; () for all.
            dim: Channels per head.

        Raises:
            ValueError: If channels are neither one range nor two ranges of the same size.
        """
        channels = channels or tuple(range(dim))
        first, size = channels[0], len(channels) // 2
        second_range_start = channels[size]
        two_ranges = (
            *range(first, first + size),
            *range(second_range_start, second_range_start + size),
        )
        one_range = tuple(range(first, first + len(channels)))
        if channels not in (two_ranges, one_range) or channels[-1] >= dim:
            raise ValueError(
                f"channels must be one run of adjacent channels, or two equally long runs, all "
                f"below {dim}, got {channels}. Use () for all channels."
            )
        return cls(first=first, distance=second_range_start - first, size=size)

    @property
    def constants(self) -> dict[str, int]:
        """The ranges as constexpr arguments of kernels, by name."""
        return {
            "FIRST_CHANNEL": self.first,
            "HALF_DISTANCE": self.distance,
            "HALF_SIZE": self.size,
        }
