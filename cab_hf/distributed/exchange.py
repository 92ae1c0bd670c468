"""Communication of ranks: collectives, what they must agree on, and which rank has failed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

# models attend on one process where torch is built without the rest of it
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, Work

# seconds that survivors give each other to report that they live
GRACE = 5.0


class RankLost(RuntimeError):
    """Another rank has stopped, so that this one cannot go on."""


def group_of(group: ProcessGroup | None) -> ProcessGroup:
    """The group itself, or the default one for None.

    Raises:
        ValueError: where no process group has been made, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group is None and there is no process group; launch with torchrun and call "
            "torch.distributed.init_process_group() first."
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "group must be a ProcessGroup that contains this process, such as "
            f"mesh.get_group('cp'), got {group!r}."
        )
    return group


def start_gather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """(what will be the x [n, ...] of all ranks, [W * n, ...]; the work to wait for)."""
    # memory that runs out is no loss of a rank
    x, everyone = x.contiguous(), x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    with watched(group):
        return everyone, _collective("all_gather_single")(everyone, x, group=group, async_op=True)


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """(what will be this rank's part [n, ...] of the sum of all x [W * n, ...]; the work)."""
    x, mine = x.contiguous(), x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    with watched(group):
        return mine, _collective("reduce_scatter_single")(mine, x, group=group, async_op=True)


def finish(work: Work, group: ProcessGroup) -> None:
    """Wait for it: the host on the CPU, the current stream on a GPU."""
    with watched(group):
        work.wait()


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """The x [n, ...] of all ranks, [W * n, ...]. No gradient."""
    everyone, work = start_gather(x.detach(), group)
    finish(work, group)
    return everyone


def require_equal(facts: Mapping[str, int], group: ProcessGroup, device: torch.device) -> None:
    """Make sure that every rank has the same ``facts``, whole numbers by name.

    One small all-gather and a wait for it. Whether to call it must not depend on what one rank
    alone knows: a rank that calls it alone would read the others' next message as the answer.

    Raises:
        ValueError: on every rank, naming a fact, the ranks and what each of them has.
    """
    mine = torch.tensor([list(facts.values())], dtype=torch.int64, device=device)
    everyone = gathered(mine, group).tolist()
    for name, seen in zip(facts, zip(*everyone, strict=True), strict=True):
        if len(set(seen)) > 1:
            text = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(seen))
            raise ValueError(
                f"{name} differ between the ranks of one text: {text}; give every rank its shard "
                "of the same batch, and the same model."
            )


@contextmanager
def watched(group: ProcessGroup) -> Iterator[None]:
    """Turn a backend's error into one sentence about the rank that caused it."""
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        raise RankLost(_failure_message(group, error)) from error


def publish_failure(group: ProcessGroup, error: BaseException) -> None:
    """Leave the cause of this rank's end where the others will look for it."""
    # the store may have gone with the rank that kept it
    with suppress(RuntimeError, AttributeError):
        group.get_group_store().set(_key("cause", group.rank()), _sentence(error))


def failures_of_others(group: ProcessGroup) -> list[str]:
    """What each other rank that has stopped has left by `publish_failure`, a clause each."""
    try:
        store = group.get_group_store()
        return [
            f"rank {rank} stopped: {store.get(_key('cause', rank)).decode()}"
            for rank in range(group.size())
            if rank != group.rank() and store.check([_key("cause", rank)])
        ]
    except (RuntimeError, AttributeError):
        return []


def withdraw_failure(group: ProcessGroup) -> None:
    """Withdraw `publish_failure`: this rank goes on."""
    with suppress(RuntimeError, AttributeError):
        group.get_group_store().delete_key(_key("cause", group.rank()))


def _failure_message(group: ProcessGroup, error: RuntimeError) -> str:
    """Who stopped and why, as far as the others can know."""
    me, others = group.rank(), [r for r in range(group.size()) if r != group.rank()]
    try:
        store = group.get_group_store()
        store.set(_key("alive", me), b"1")
        # ranks that wait for this one stop waiting, and raise
        group.abort()
        silent = _silent(store, others)
        causes = failures_of_others(group)
    except (RuntimeError, AttributeError):
        return f"rank {me} of {group.size()} stops, as another rank is gone: {_sentence(error)}"
    if not causes and silent:
        causes = [f"rank {', '.join(map(str, silent))} stopped without reporting an error"]
    result = "; ".join(causes) or "every rank lives, and the connection does not"
    return f"rank {me} of {group.size()} stops, as {result} ({_sentence(error)})"


def _silent(store: Store, others: list[int]) -> list[int]:
    """The ranks that have reported neither that they live nor why they failed."""
    deadline = time.monotonic() + GRACE
    while True:
        silent = [
            rank
            for rank in others
            if not any(store.check([_key(what, rank)]) for what in ("alive", "cause"))
        ]
        if not silent or time.monotonic() > deadline:
            return silent
        time.sleep(0.05)


# what torch called its collectives before 2.13
FORMERLY = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def _collective(name: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, FORMERLY[name])


def _key(what: str, rank: int) -> str:
    return f"cab_hf/{what}/{rank}"


def _sentence(error: BaseException) -> str:
    """The first line of it."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__
