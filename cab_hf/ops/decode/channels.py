"""Scored channels: the channels of keys that the decode index contains, as arguments of kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class ChannelHalves(NamedTuple):
    """Scored channels as two ranges of adjacent channels with the same size.

    Attributes:
        first_channel: First channel of the first range.
        half_distance: First channel of the second range minus first channel of the first range.
        half_size: Number of channels of each range.
    """

    first_channel: int
    half_distance: int
    half_size: int

    @classmethod
    @lru_cache
    def from_channels(cls, channels: tuple[int, ...], dim: int) -> ChannelHalves:
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
        first_channel, half_size = channels[0], len(channels) // 2
        second_range_start = channels[half_size]
        channels_of_two_ranges = (
            *range(first_channel, first_channel + half_size),
            *range(second_range_start, second_range_start + half_size),
        )
        channels_of_one_range = tuple(range(first_channel, first_channel + len(channels)))
        if channels not in (channels_of_two_ranges, channels_of_one_range) or channels[-1] >= dim:
            raise ValueError(
                f"channels must be one run of adjacent channels, or two equally long runs, all "
                f"below {dim}, got {channels}. Use () for all channels."
            )
        return cls(
            first_channel=first_channel,
            half_distance=second_range_start - first_channel,
            half_size=half_size,
        )

    @property
    def constexpr_arguments(self) -> dict[str, int]:
        """The ranges as constexpr arguments of kernels, by name."""
        return {
            "FIRST_CHANNEL": self.first_channel,
            "HALF_DISTANCE": self.half_distance,
            "HALF_SIZE": self.half_size,
        }
