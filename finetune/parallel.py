"""Groups of processes that share a sequence, and the part of each process."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

import cab_hf
from cab_hf.distributed import shard
from cab_hf.distributed.sharding import lengths_between, sharding_of
from cab_hf.finetune.objective import Batch
from cab_hf.finetune.settings import Settings
from cab_hf.hf.model_config import cab_config_of as cab_config
from cab_hf.plan import DENSE_BLOCK_SIZE

# inputs of a model in a shard, without labels
INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q")


class Parallel:
    """The processes as replicas of ``cp`` consecutive ranks each.

    A replica trains on its own sequences, each sharded over its processes. With ``cp`` 1 every
    process is a replica, and batches are not sharded.

    Attributes:
        replicas: number of replicas.
        replica: index of the replica of this process.

    Raises:
        UsageError: ``cp`` does not divide the number of processes.
    """

    def __init__(self, settings: Settings, model: nn.Module, accelerator: Any) -> None:
        self.replicas = settings.replicas(accelerator.num_processes)
        self.replica = accelerator.process_index // settings.cp
        # a recomputed layer gathers again by itself
        self.regather_kv = not settings.checkpointing
        self.group, self.block = None, DENSE_BLOCK_SIZE
        if settings.cp > 1:
            shape = self.replicas, settings.cp
            mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp", "cp"))
            self.group = mesh.get_group("cp")
            self.block = block_of(model)

    def attending(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Make ``model`` attend to sequences that are sharded over its replica in the block."""
        if self.group is None:
            return nullcontext()
        return cab_hf.context_parallel(
            model, self.group, block=self.block, regather_kv=self.regather_kv
        )

    def sharded(self, batch: Batch) -> Batch:
        """Return this process's part, [1, n] tensors, of a batch of its replica, [B, N] tensors.

        Each token and label is in one process of the replica; labels of padding are -100. Rows are
        concatenated, because documents attend to themselves alone.
        """
        return batch if self.group is None else sharded(batch, self.group, self.block)

    def positions(self, sharded: Batch) -> Tensor:
        """Return the positions of a sharded batch in its documents, int64 [B, n].

        Padding is left out.
        """
        if self.group is None:
            return sharded["position_ids"]
        lengths = lengths_between(sharded["cu_seq_lens_q"])
        sharding = sharding_of(lengths, self.group.size(), self.block)
        return sharded["position_ids"][:, sharding.real[self.group.rank()]]


def block_of(model: nn.Module) -> int:
    """Return the number of tokens of which the chunks of processes are multiples."""
    config = cab_config(model.config.get_text_config())
    return math.lcm(DENSE_BLOCK_SIZE, config.query_block, config.key_block)


def sharded(batch: Batch, group: ProcessGroup, block: int) -> Batch:
    """Return a process's tokens of a batch [B, N], whose labels, if any, are already shifted."""
    row = {name: each.reshape(1, -1) for name, each in batch.items()}
    if "labels" in row:
        row["shift_labels"] = row.pop("labels")
    mine = shard(row, group, block)
    return {name: mine[name] for name in (*INPUTS, "labels") if name in mine}
