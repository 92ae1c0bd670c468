"""The ranks that a speed op runs on: what they do together, and how long the slowest of them takes.

Rank 0 decides and writes, the others follow it. What they say to each other beside what is measured
goes over a group of its own, on the CPU.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from cab_hf.distributed import RankLost
from cab_hf.eval.speed.timing import MOST_RUNS, Bench, in_a_sentence
from cab_hf.runs.settings import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Found = TypeVar("Found")
# how long ranks wait for one that works alone
PATIENCE = timedelta(hours=2)
# torch's names of collectives of one tensor, before 2.13 and from then on
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
HOPS = "batch_isend_irecv"
ROW_SECONDS = 1.0  # that several calls in a row may take


class Slowest(NamedTuple):
    """The median over ``runs`` of what the slowest rank took, and the highest peak of any rank.

    Every run is so many calls ``in_a_row``, and ``ms`` that of one of them; ``each_ms`` are those
    of all runs.
    """

    ms: float
    peak_gib: float | None
    runs: int
    in_a_row: int = 1
    each_ms: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class Team:
    """Ranks in step; without groups, one rank for itself.

    Attributes:
        group: what is measured runs on it.
        control: of the same ranks, on the CPU.
    """

    group: ProcessGroup | None = None
    control: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def from_rank_0(self, value: Found) -> Found:
        """What rank 0 gave, on every rank."""
        return self.everyone(value)[0]

    def everyone(self, value: Found) -> list[Found]:
        """What the ranks gave, in order."""
        if self.control is None:
            return [value]
        result: list[Any] = [None] * self.size
        dist.all_gather_object(result, value, group=self.control)
        return result

    def together(self, call: Callable[[], Found]) -> Found:
        """What ``call`` returns on this rank, once it has returned on all.

        Raises:
            RuntimeError: on every rank where it failed on any, with what went wrong there.
        """
        if self.control is None:
            return call()
        result, why = None, None
        try:
            result = call()
        except RankLost:
            # the others cannot be asked any more
            raise
        except Exception as error:
            why = in_a_sentence(error)
        given = self.everyone(why)
        failed = [rank for rank, each in enumerate(given) if each is not None]
        if failed:
            where = "" if len(failed) == self.size else f"rank {failed[0]}: "
            raise RuntimeError(f"{where}{given[failed[0]]}")
        return result

    def barrier(self) -> None:
        """Return when all ranks are here."""
        if self.group is not None:
            dist.barrier(self.group)

    def slowest(
        self,
        bench: Bench,
        call: Callable[[], Any],
        least: int,
        seconds: float = 0.0,
        in_a_row: int = 1,
        warm_up: float = math.inf,
    ) -> Slowest:
        """Time ``call``, which all ranks begin together: at least ``least`` runs, for ``seconds``.

        A run is at most ``in_a_row`` calls, as many as take `ROW_SECONDS`: what follows on others
        is set under way while they compute, as the layers of a model are; how many, one before
        tells. A first call is not counted, unless it takes more than ``warm_up`` seconds.
        """

        def walls(runs: int, row: int = 1) -> tuple[list[float], float | None]:
            def some() -> None:
                for _ in range(row):
                    call()

            return self.together(lambda: bench.walls(some, runs, self.barrier))

        def one() -> tuple[list[float], float | None, float]:
            first, peak = walls(1)
            return first, peak, max(*self.everyone(first[0]), 1e-6)

        first, peak, took = one()
        if took <= warm_up * 1e3:
            first, peak, took = one()
        row = max(1, min(in_a_row, int(ROW_SECONDS * 1e3 / took)))
        runs = min(MOST_RUNS, max(least, int(seconds * 1e3 / (row * took))))
        if row > 1:
            first, peak = walls(runs, row)
        elif runs > 1:
            more, peak = walls(runs - 1)
            first += more
        each = [max(times) / row for times in zip(*self.everyone(first), strict=True)]
        peaks = self.everyone(peak)
        highest = None if None in peaks else max(peaks)
        return Slowest(statistics.median(each), highest, runs, row, each)


@contextmanager
def launched(device: str, command: str) -> Iterator[Team]:
    """The ranks that torchrun has started, one a GPU of this host, or one a process on the CPU.

    Raises:
        UsageError: where torchrun has started nothing.
    """
    if "RANK" not in os.environ:
        raise UsageError(
            "it runs on ranks that torchrun starts, and this process is none; launch it with "
            f"torchrun --nproc_per_node=N -m {command}."
        )
    if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        raise UsageError(
            f"torchrun has started {os.environ['WORLD_SIZE']} ranks on several hosts; it measures "
            "those of one, and foresees what several take."
        )
    if torch.device(device).type == "cuda":
        mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(mine)
        dist.init_process_group("nccl", device_id=mine)
    else:
        dist.init_process_group("gloo")
    try:
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield Team(dist.group.WORLD, control)
    finally:
        dist.destroy_process_group()


class Collective(NamedTuple):
    """One collective as it was started: shapes of what a rank sends and receives, and to whom."""

    name: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    dtype: torch.dtype
    to: int | None = None
    of: int | None = None

    @property
    def bytes(self) -> int:
        """That a rank receives of others."""
        sent, received = (torch.Size(shape).numel() for shape in (self.sent, self.received))
        if self.to is None:
            received = abs(received - sent)
        return received * self.dtype.itemsize


@contextmanager
def recorded() -> Iterator[list[Collective]]:
    """The collectives of tensors that this process starts inside, in order."""
    seen: list[Collective] = []
    originals = {
        name: getattr(dist, name) for name in (*GATHERS, *SCATTERS, HOPS) if hasattr(dist, name)
    }

    def spy(name: str) -> Callable[..., Any]:
        def started(*given: Any, **more: Any) -> Any:
            seen.append(_hops(*given) if name == HOPS else _single(name, *given[:2]))
            return originals[name](*given, **more)

        return started

    try:
        for name in originals:
            setattr(dist, name, spy(name))
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _single(name: str, received: torch.Tensor, sent: torch.Tensor) -> Collective:
    return Collective(name, tuple(sent.shape), tuple(received.shape), sent.dtype)


def _hops(ops: Sequence[dist.P2POp]) -> Collective:
    send, receive = ops
    shapes = tuple(send.tensor.shape), tuple(receive.tensor.shape)
    return Collective(HOPS, *shapes, send.tensor.dtype, send.group_peer, receive.group_peer)


def replay(
    seen: Sequence[Collective], group: ProcessGroup, device: torch.device
) -> Callable[[], None]:
    """What does the same collectives again, one after the other, on tensors that mean nothing."""
    room = {
        each: tuple(
            torch.zeros(shape, dtype=each.dtype, device=device)
            for shape in (each.sent, each.received)
        )
        for each in dict.fromkeys(seen)
    }

    def again() -> None:
        for each in seen:
            sent, received = room[each]
            if each.name == HOPS:
                ops = (dist.isend, sent, each.to), (dist.irecv, received, each.of)
                works = dist.batch_isend_irecv(
                    [dist.P2POp(op, x, group=group, group_peer=peer) for op, x, peer in ops]
                )
            else:
                call = getattr(dist, each.name)
                works = [call(received, sent, group=group, async_op=True)]
            for work in works:
                work.wait()

    return again
