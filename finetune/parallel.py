"""Context parallelism of a training run: groups of processes over which sequences are sharded."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

import cab_hf
from cab_hf.distributed import shard
from cab_hf.distributed.sharding import get_sharding, lengths_from_boundaries
from cab_hf.finetune.objective import Batch
from cab_hf.finetune.settings import Settings
from cab_hf.hf.model_config import cab_config_of
from cab_hf.plan import DENSE_BLOCK_SIZE

# model inputs of a sharded batch
MODEL_INPUT_NAMES = ("input_ids", "position_ids", "cu_seq_lens_q")


class ContextParallelism:
    """The grouping of a run's processes into replicas of ``cp`` consecutive ranks.

    Each replica trains on different sequences, and shards each sequence over its processes. If
    ``cp`` is 1, each process is a replica, and sequences are not sharded.

    Args:
        settings: the settings of the run.
        model: the model to train.
        accelerator: accelerate's accelerator.

    Attributes:
        num_replicas: number of replicas.
        replica_index: index of the replica of this process.
        group: process group of this replica; None if ``cp`` is 1.
        block_tokens: the length of a process's chunk of a sequence is a multiple of this number of
            tokens.
        regather_kv: True to gather keys and values again in the backward pass.

    Raises:
        UsageError: ``cp`` does not divide the number of processes.
    """

    def __init__(self, settings: Settings, model: nn.Module, accelerator: Any) -> None:
        self.num_replicas = settings.count_replicas(accelerator.num_processes)
        self.replica_index = accelerator.process_index // settings.cp
        # with gradient checkpointing, the recomputed forward pass gathers keys and values again
        self.regather_kv = not settings.checkpointing
        self.group, self.block_tokens = None, DENSE_BLOCK_SIZE
        if settings.cp > 1:
            mesh_shape = self.num_replicas, settings.cp
            mesh = init_device_mesh(
                accelerator.device.type, mesh_shape, mesh_dim_names=("dp", "cp")
            )
            self.group = mesh.get_group("cp")
            self.block_tokens = get_block_tokens(model)

    def shard_model_inputs(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager in which ``model`` receives the shards of `shard_batch`."""
        if self.group is None:
            return nullcontext()
        return cab_hf.context_parallel(
            model, self.group, block=self.block_tokens, regather_kv=self.regather_kv
        )

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this process's shard of a batch.

        Each token is in the shard of exactly one process of the replica. Labels of padding are
        -100. The rows of the batch are concatenated to one row, which changes no result, because no
        document attends to another one.

        Args:
            batch: [B, N] tensors, equal in all processes of the replica.

        Returns:
            [1, n] tensors; the unchanged ``batch`` if ``cp`` is 1.
        """
        return batch if self.group is None else shard_batch(batch, self.group, self.block_tokens)

    def get_local_positions(self, local_batch: Batch) -> Tensor:
        """Return the position ids of this process's tokens without padding, int64 [B, n].

        ``local_batch`` is the result of `shard_batch`.
        """
        if self.group is None:
            return local_batch["position_ids"]
        lengths = lengths_from_boundaries(local_batch["cu_seq_lens_q"])
        sharding = get_sharding(lengths, self.group.size(), self.block_tokens)
        return local_batch["position_ids"][:, sharding.is_real[self.group.rank()]]


def get_block_tokens(model: nn.Module) -> int:
    """Return the block size of ``model`` in tokens for `cab_hf.context_parallel`.

    The result is the least common multiple of the block sizes of dense and sparse attention.
    """
    block_config = cab_config_of(model.config.get_text_config())
    return math.lcm(DENSE_BLOCK_SIZE, block_config.query_block, block_config.key_block)


def shard_batch(batch: Batch, group: ProcessGroup, block_tokens: int) -> Batch:
    """Return this process's shard of a batch, [1, n] tensors.

    Args:
        batch: [B, N] tensors; labels, if any, are already shifted.
        group: process group over which the batch is sharded.
        block_tokens: tokens; the lengths of chunks are multiples of this number.
    """
    flat_batch = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
    if "labels" in flat_batch:
        flat_batch["shift_labels"] = flat_batch.pop("labels")
    own_shard = shard(flat_batch, group, block_tokens)
    return {name: own_shard[name] for name in (*MODEL_INPUT_NAMES, "labels") if name in own_shard}
