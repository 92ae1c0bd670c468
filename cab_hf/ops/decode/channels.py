"""Which channels of a key the index of decode holds, as its kernels take them."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import triton

# channels of a product of 8-bit floats come in multiples of this
LEAST_CHANNELS = 32


class Channels(NamedTuple):
    """Which channels are scored, as kernels take them: equal runs of neighbours.

    Attributes:
        first: where the first run begins.
        step: from where one begins to where the next does.
        size, count: of a run, and how many there are.
    """

    first: int
    step: int
    size: int
    count: int

    @classmethod
    @lru_cache
    def of(cls, channels: tuple[int, ...], dim: int) -> Channels:
        """Those of `LayerContext.channels`, () for all ``dim``. Made once for all layers.

        Raises:
            ValueError: for channels that are not one run, or two of one size.
        """
        channels = channels or tuple(range(dim))
        starts = [channels[0], *(b for a, b in pairwise(channels) if b != a + 1)]
        size = len(channels) // len(starts)
        made = cls(starts[0], (starts[-1] - starts[0]) or dim, size, len(starts))
        if len(starts) > 2 or channels != made.listed or channels[-1] >= dim:
            raise ValueError(
                f"channels is {channels}; scored are one run of channels below {dim}, or two runs "
                "of one size."
            )
        return made

    @classmethod
    def of_halves(cls, channels: tuple[int, ...], dim: int) -> Channels:
        """Those of `of` as two runs of one size, which may be neighbours; of an odd count of them
        the last is left out.
        """
        runs = cls.of(channels, dim)
        return runs if runs.count == 2 else cls(runs.first, runs.size // 2, runs.size // 2, 2)

    @property
    def listed(self) -> tuple[int, ...]:
        starts = [self.first + run * self.step for run in range(self.count)]
        return tuple(start + at for start in starts for at in range(self.size))

    @property
    def width(self) -> int:
        """How wide scored vectors are: runs are filled up to powers of two, by zeros."""
        return self.count * self.room

    @property
    def room(self) -> int:
        """Of one run."""
        return max(LEAST_CHANNELS // self.count, triton.next_power_of_2(self.size))
