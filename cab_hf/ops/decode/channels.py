"""Which channels of a key the index of decode holds, as its kernels take them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Halves(NamedTuple):
    """The channels that are scored, as two runs of neighbours of one size.

    Attributes:
        first: where the first run begins.
        step: from where it begins to where the second does.
        size: of each.
    """

    first: int
    step: int
    size: int

    @classmethod
    @lru_cache
    def of(cls, channels: tuple[int, ...], dim: int) -> Halves:
        """Those of `LayerContext.channels`, () for all ``dim``. Made once for all layers.

        One run is cut in half; of an odd count of channels the last is left out.

        Raises:
            ValueError: for channels that are not one run, or two of one size.
        """
        channels = channels or tuple(range(dim))
        first, size = channels[0], len(channels) // 2
        halves = cls(first, channels[size] - first, size)
        runs = (*range(first, first + size), *range(channels[size], channels[size] + size))
        one_run = tuple(range(first, first + len(channels)))
        if channels not in (runs, one_run) or channels[-1] >= dim:
            raise ValueError(
                f"channels is {channels}; scored are one run of channels below {dim}, or two runs "
                "of one size."
            )
        return halves

    @property
    def constants(self) -> dict[str, int]:
        """As arguments of kernels."""
        return {"FIRST": self.first, "STEP": self.step, "SIZE": self.size}
