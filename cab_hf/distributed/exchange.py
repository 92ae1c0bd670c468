"""Communication between ranks: collectives, equality checks and reports of failed ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

# a build of torch without distributed support still runs models in one process
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, Work

# seconds that a rank waits for the reports of other ranks after a failure
GRACE = 5.0


class RankLost(RuntimeError):
    """Another rank stopped, so this rank cannot continue."""


def group_of(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group, or the default group for None.

    Raises:
        ValueError: no process group exists, or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "torch.distributed must be initialised, got no process group. Launch with torchrun and "
            "call torch.distributed.init_process_group() first."
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a ProcessGroup of this process, got {group!r}. Give a group such as "
            "mesh.get_group('cp')."
        )
    return group


def start_all_gather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Start an all-gather of x [n, ...]; return (result [W * n, ...], work to wait for)."""
    # outside of `watched`: an out-of-memory error does not mean that a rank is lost
    x, result = x.contiguous(), x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    with watched(group):
        return result, _collective("all_gather_single")(result, x, group=group, async_op=True)


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Start a reduce-scatter of x [W * n, ...]; return (result [n, ...], work to wait for)."""
    x, result = x.contiguous(), x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    with watched(group):
        return result, _collective("reduce_scatter_single")(result, x, group=group, async_op=True)


def finish(work: Work, group: ProcessGroup) -> None:
    """Wait for a collective. On a GPU only the current stream waits, on a CPU the host waits."""
    with watched(group):
        work.wait()


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x [n, ...] of all ranks, [W * n, ...], without gradient."""
    result, work = start_all_gather(x.detach(), group)
    finish(work, group)
    return result


def require_equal(facts: Mapping[str, int], group: ProcessGroup, device: torch.device) -> None:
    """Check with one small all-gather that all ranks have the same ``facts``.

    All ranks must call this together. If one rank calls it alone, the rank reads the next message
    of the other ranks as the answer.

    Args:
        facts: whole numbers by name.
        group: the ranks that compare facts.
        device: device of the collective.

    Raises:
        ValueError: a fact differs. Every rank raises, with the values of all ranks.
    """
    own_values = torch.tensor([list(facts.values())], dtype=torch.int64, device=device)
    values = all_gather(own_values, group).tolist()
    for name, by_rank in zip(facts, zip(*values, strict=True), strict=True):
        if len(set(by_rank)) > 1:
            text = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(by_rank))
            raise ValueError(
                f"{name} must be equal on all ranks, got {text}. Give every rank its shard of the "
                "same batch, and the same model."
            )


@contextmanager
def watched(group: ProcessGroup) -> Iterator[None]:
    """Turn an error of the backend into a `RankLost` that names the rank that caused it."""
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        raise RankLost(_failure_message(group, error)) from error


def publish_failure(group: ProcessGroup, error: BaseException) -> None:
    """Write the cause of this rank's failure to the store of the group."""
    # the store is gone if the rank that hosts it has stopped
    with suppress(RuntimeError, AttributeError):
        group.get_group_store().set(_key("cause", group.rank()), _sentence(error))


def failures_of_others(group: ProcessGroup) -> list[str]:
    """Return a clause for every other rank that reported its failure with `publish_failure`."""
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
    """Delete the report of `publish_failure`, because this rank continues."""
    with suppress(RuntimeError, AttributeError):
        group.get_group_store().delete_key(_key("cause", group.rank()))


def _failure_message(group: ProcessGroup, error: RuntimeError) -> str:
    """Return which rank stopped and why, as far as this rank can find out."""
    me, others = group.rank(), [r for r in range(group.size()) if r != group.rank()]
    try:
        store = group.get_group_store()
        store.set(_key("alive", me), b"1")
        # ranks that wait for this rank now stop waiting, and raise
        group.abort()
        silent = _silent(store, others)
        causes = failures_of_others(group)
    except (RuntimeError, AttributeError):
        return f"rank {me} of {group.size()} stops: another rank is gone ({_sentence(error)})"
    if not causes and silent:
        causes = [f"rank {', '.join(map(str, silent))} stopped without reporting an error"]
    result = "; ".join(causes) or "all ranks are running, but the connection failed"
    return f"rank {me} of {group.size()} stops: {result} ({_sentence(error)})"


def _silent(store: Store, others: list[int]) -> list[int]:
    """Return the ranks that reported neither that they are running nor why they failed."""
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


# names of the collectives before torch 2.13
FORMERLY = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def _collective(name: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, FORMERLY[name])


def _key(what: str, rank: int) -> str:
    return f"cab_hf/{what}/{rank}"


def _sentence(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__
