"""What a turn of context parallelism should take, told by one rank's rate and that of the links.

Everything is in seconds and bytes, and nothing here measures. Collectives of one turn stand in one
queue, and run beside what is computed; a slice of KV heads is attended while the next one travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True)
class Link:
    """Between ranks: seconds before anything arrives, and bytes a second that a rank receives.

    Both are taken to be the same for any number of ranks.
    """

    latency: float
    rate: float

    def seconds(self, received: float) -> float:
        """Of a collective in which every rank receives so many bytes."""
        return self.latency + received / self.rate

    def at_most(self, rate: float) -> Link:
        """The same, over a hop of ``rate`` bytes a second: the slowest one decides."""
        return replace(self, rate=min(self.rate, rate))


def fitted(points: Sequence[tuple[float, float]]) -> Link | None:
    """The link whose seconds err least, relatively and squared, from (bytes received, seconds).

    None where seconds do not rise with bytes. A latency below zero is zero.
    """
    if len({received for received, _ in points}) < 2:
        return None
    received, seconds = np.array(points).T
    a_byte, latency = np.polyfit(received, seconds, 1, w=1 / seconds)
    if latency < 0:
        x = received / seconds
        latency, a_byte = 0.0, x.sum() / (x * x).sum()
    return Link(float(latency), float(1 / a_byte)) if a_byte > 0 else None


@dataclass(frozen=True)
class Text:
    """What travels of one layer.

    Attributes:
        tokens: of the whole text, padding left out.
        held: tokens of a rank, padding included.
        token_bytes: of K and V of one KV head, of all batch rows.
        slices: KV heads that travel together, one number a slice.
    """

    tokens: int
    world: int
    held: int
    token_bytes: int
    slices: tuple[int, ...]

    @property
    def heads(self) -> int:
        return sum(self.slices)

    def received(self, heads: int) -> int:
        """Bytes that every rank receives where all ranks tell all others of so many KV heads."""
        return (self.world - 1) * self.hop(heads)

    def hop(self, heads: int) -> int:
        """Bytes of what one rank holds."""
        return self.held * heads * self.token_bytes


@dataclass(frozen=True)
class Alone:
    """Seconds of one rank that holds the whole text: a forward pass, its backward pass, and of the
    forward pass what every rank does as well, such as choosing blocks for the whole text."""

    forward: float
    backward: float | None = None
    undivided: float = 0.0


def slowest_share(scheme: str, tokens: int, world: int) -> float:
    """Of all causal pairs, those of the rank that has the most, in a text without padding.

    Zigzag: chunk j of c tokens, of 2 W, has j c^2 + c (c + 1) / 2 pairs, and chunks r and
    2 W - 1 - r together (2 W - 1) c^2 + c (c + 1) on every rank: 1 / W. Contiguous: the last n
    tokens of W n have n^2 (W - 1) + n (n + 1) / 2, which is towards (2 W - 1) / W of the mean.
    """
    if scheme != "contiguous":
        return 1 / world
    held = tokens / world
    return ((2 * world - 1) * held + 1) / (world * (tokens + 1))


def turn(
    scheme: str, direction: str, text: Text, alone: Alone, gather: Link, scatter: Link
) -> float | None:
    """Seconds of a turn of the slowest rank; None for a backward pass of which nothing is known.

    Args:
        scheme: "ring", "contiguous", or any form of zigzag.
        direction: `FORWARD` or `BOTH`.
        gather, scatter: of all-gathers and reduce-scatters; hops of a ring are taken for the first.
    """
    if direction == BOTH and alone.backward is None:
        return None
    share = slowest_share(scheme, text.tokens, text.world)
    forward = share * (alone.forward - alone.undivided)
    backward = share * alone.backward if direction == BOTH else None
    if scheme == "ring":
        return alone.undivided + ring(
            forward, backward, text.world, gather.seconds(text.hop(text.heads))
        )
    gathers = [gather.seconds(text.received(heads)) for heads in text.slices]
    parts = [heads / text.heads for heads in text.slices]
    seconds = alone.undivided + forward_pass([forward * part for part in parts], gathers)
    if backward is None:
        return seconds
    scatters = [scatter.seconds(text.received(heads)) for heads in text.slices]
    return seconds + backward_pass([backward * part for part in parts], gathers, scatters)


def forward_pass(attend: Sequence[float], gathers: Sequence[float]) -> float:
    """Of slices: the first is waited for, each is attended while the next one travels."""
    following = [*gathers[1:], 0.0]
    return gathers[0] + sum(map(max, attend, following))


def backward_pass(
    attend: Sequence[float], gathers: Sequence[float], scatters: Sequence[float]
) -> float:
    """Of slices from last to first: gathered again, and their gradients sent home.

    Beside each travel the gradients of the slice after it and, behind them, the slice before it.
    The last slice is waited for, and so are the gradients of the first.
    """
    beside = [
        before + after
        for before, after in zip([0.0, *gathers[:-1]], [*scatters[1:], 0.0], strict=True)
    ]
    return gathers[-1] + sum(map(max, attend, beside)) + scatters[0]


def ring(forward: float, backward: float | None, world: int, hop: float) -> float:
    """Of W steps, each of which but the last passes K and V on; backward waits for every hop."""
    step = forward / world
    seconds = (world - 1) * max(step, hop) + step
    return seconds if backward is None else seconds + backward + (world - 1) * hop
