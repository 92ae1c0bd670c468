"""Communication between ranks: collectives, equality checks and reports of failed ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

# imports for type checkers only: a build of torch without distributed support lacks these names
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, Work

# seconds that a rank waits for the reports of other ranks after a failure
REPORT_TIMEOUT_SECONDS = 5.0


class RankLost(RuntimeError):
    """Another rank stopped, so this rank cannot continue."""


def resolve_group(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, or the default process group if ``group`` is None.

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
    """Start an all-gather of x, [n, ...].

    Returns:
        (result [W * n, ...], work). The result is valid after `wait_for_collective`.
    """
    # allocate outside of `name_lost_rank`, because an out-of-memory error of this rank does not
    # mean that another rank stopped
    x, gathered_tensor = x.contiguous(), x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    with name_lost_rank(group):
        return gathered_tensor, _get_collective("all_gather_single")(
            gathered_tensor, x, group=group, async_op=True
        )


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """Start a reduce-scatter, which sums x [W * n, ...] over ranks.

    Returns:
        (result [n, ...], work). The result is valid after `wait_for_collective`.
    """
    x, reduced_shard = x.contiguous(), x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    with name_lost_rank(group):
        return reduced_shard, _get_collective("reduce_scatter_single")(
            reduced_shard, x, group=group, async_op=True
        )


def wait_for_collective(work: Work, group: ProcessGroup) -> None:
    """Wait for a collective: with NCCL the current CUDA stream waits, with gloo the process."""
    with name_lost_rank(group):
        work.wait()


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x [n, ...] of all ranks as one tensor [W * n, ...], without gradient."""
    gathered_tensor, work = start_all_gather(x.detach(), group)
    wait_for_collective(work, group)
    return gathered_tensor


def require_equal_values(
    compared_values: Mapping[str, int], group: ProcessGroup, device: torch.device
) -> None:
    """Check with one small all-gather that all ranks have the same ``compared_values``.

    All ranks must call this function together. If only one rank calls this function, the backend
    combines its all-gather with the next collective of the other ranks, which is an error.

    Args:
        compared_values: numbers to compare, by name; the names are equal on all ranks.
        group: the ranks that compare their numbers.
        device: device of the collective.

    Raises:
        ValueError: a number differs. Every rank raises, with the values of all ranks.
    """
    local_values = torch.tensor([list(compared_values.values())], dtype=torch.int64, device=device)
    # [value, rank]
    gathered_values = all_gather(local_values, group).T.tolist()
    for value_name, rank_values in zip(compared_values, gathered_values, strict=True):
        if len(set(rank_values)) > 1:
            values_text = ", ".join(
                f"{value} on rank {rank}" for rank, value in enumerate(rank_values)
            )
            raise ValueError(
                f"{value_name} must be equal on all ranks, got {values_text}. Give every rank its "
                "shard of the same batch, and the same model."
            )


@contextmanager
def name_lost_rank(group: ProcessGroup) -> Iterator[None]:
    """Convert an error of the collective backend to a `RankLost` that names the stopped rank."""
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        raise RankLost(_abort_and_describe_failure(group, error)) from error


def publish_failure(group: ProcessGroup, error: BaseException) -> None:
    """Write this rank's error to the store of the group, where other ranks can read the error."""
    # no store answers if the rank that hosts the store has stopped
    with suppress(RuntimeError, AttributeError):
        group.get_group_store().set(_make_store_key("cause", group.rank()), _summarise_error(error))


def read_failures(group: ProcessGroup) -> list[str]:
    """Return "rank R stopped: ERROR" for every other rank that called `publish_failure`."""
    try:
        store = group.get_group_store()
        return [
            f"rank {rank} stopped: {store.get(_make_store_key('cause', rank)).decode()}"
            for rank in range(group.size())
            if rank != group.rank() and store.check([_make_store_key("cause", rank)])
        ]
    except (RuntimeError, AttributeError):
        return []


def withdraw_failure(group: ProcessGroup) -> None:
    """Delete what `publish_failure` wrote for this rank."""
    with suppress(RuntimeError, AttributeError):
        group.get_group_store().delete_key(_make_store_key("cause", group.rank()))


def _abort_and_describe_failure(group: ProcessGroup, error: RuntimeError) -> str:
    """Abort the group, and return a sentence with the ranks that stopped and their errors.

    Args:
        group: the ranks that share the sequence.
        error: error of the collective backend on this rank.
    """
    this_rank = group.rank()
    other_ranks = [rank for rank in range(group.size()) if rank != this_rank]
    try:
        store = group.get_group_store()
        store.set(_make_store_key("alive", this_rank), b"1")
        # after the abort, collectives of other ranks that wait for this rank fail too
        group.abort()
        silent_ranks = _find_silent_ranks(store, other_ranks)
        causes = read_failures(group)
    except (RuntimeError, AttributeError):
        return (
            f"rank {this_rank} of {group.size()} stops: another rank is gone "
            f"({_summarise_error(error)})"
        )
    if not causes and silent_ranks:
        causes = [f"rank {', '.join(map(str, silent_ranks))} stopped without reporting an error"]
    reason = "; ".join(causes) or "all ranks are running, but the connection failed"
    return f"rank {this_rank} of {group.size()} stops: {reason} ({_summarise_error(error)})"


def _find_silent_ranks(store: Store, other_ranks: list[int]) -> list[int]:
    """Return ranks that reported neither "alive" nor a cause in `REPORT_TIMEOUT_SECONDS`."""
    deadline = time.monotonic() + REPORT_TIMEOUT_SECONDS
    while True:
        silent_ranks = [
            rank
            for rank in other_ranks
            if not any(
                store.check([_make_store_key(report_kind, rank)])
                for report_kind in ("alive", "cause")
            )
        ]
        if not silent_ranks or time.monotonic() > deadline:
            return silent_ranks
        time.sleep(0.05)


# name of a collective in torch 2.13: its name in earlier versions
OLD_COLLECTIVE_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def _get_collective(collective_name: str) -> Any:
    """Return the collective of torch.distributed that is called ``collective_name`` in torch 2.13.

    Earlier versions of torch have the collective under the name in `OLD_COLLECTIVE_NAMES`.
    """
    return getattr(dist, collective_name, None) or getattr(
        dist, OLD_COLLECTIVE_NAMES[collective_name]
    )


def _make_store_key(report_kind: str, rank: int) -> str:
    """Return the key in the group's store under which ``rank`` writes a report.

    Args:
        report_kind: "alive" if the rank is running, "cause" for the error that stopped the rank.
        rank: the rank that writes the report.
    """
    return f"cab_hf/{report_kind}/{rank}"


def _summarise_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, cut to 200 characters."""
    first_line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first_line[:200]}" if first_line else type(error).__name__
