"""Which channels of a key the index of decode holds, as its kernels take them."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import triton

# channels of a product of 8-bit numbers come in multiples of this
LEAST_CHANNELS = 32


class Channels(NamedTuple):
    """Which channels are scored: one run of neighbours, or two of one size.

    Attributes:
        first: where the first run begins.
        size: of a run.
        gap: channels between the runs.
        count: of all that are scored.
    """

    first: int
    size: int
    gap: int
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
        runs = tuple(start + at for start in starts for at in range(size))
        if len(starts) > 2 or channels != runs or channels[-1] >= dim:
            raise ValueError(
                f"channels is {channels}; scored are one run of channels below {dim}, or two runs "
                "of one size."
            )
        return cls(starts[0], size, starts[-1] - starts[0] - size, len(channels))

    @property
    def constants(self) -> dict[str, int]:
        """As arguments of kernels; their tiles are ``BLOCK_C`` wide."""
        width = max(LEAST_CHANNELS, triton.next_power_of_2(self.count))
        names = {"FIRST": self.first, "SIZE": self.size, "GAP": self.gap, "CHANNELS": self.count}
        return names | {"BLOCK_C": width}
