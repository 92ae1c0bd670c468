"""Which processes of a run learn a sequence together, and what each of them computes of it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cab_hf
from cab_hf.distributed import shard
from cab_hf.distributed.layout import layout_of, lengths_between
from cab_hf.finetune.objective import Batch
from cab_hf.finetune.settings import Settings
from cab_hf.hf.model_config import cab_config_of as cab_config
from cab_hf.plan import EXACT_BLOCK

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# what a model is given of a shard, beside the labels of the loss
INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q")


class Parallel:
    """The processes as replicas of ``cp`` each, next to each other in rank.

    A replica learns sequences of its own, each sharded over its processes; with ``cp`` 1 every
    process is one, and everything here leaves things as they are.

    Args:
        accelerator: whose processes they are; one process group holds them all.

    Attributes:
        replicas: how many there are; ``replica`` is the one that this process is in.

    Raises:
        UsageError: ``cp`` does not divide the processes.
    """

    def __init__(self, settings: Settings, model: nn.Module, accelerator: Any) -> None:
        self.replicas = settings.replicas(accelerator.num_processes)
        self.replica = accelerator.process_index // settings.cp
        # a layer that is computed again gathers again by itself
        self.regather_kv = not settings.checkpointing
        self.group, self.block = None, EXACT_BLOCK
        if settings.cp > 1:
            shape = self.replicas, settings.cp
            mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp", "cp"))
            self.group = mesh.get_group("cp")
            self.block = block_of(model)

    def attending(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Inside, ``model`` attends to sequences that its replica holds."""
        if self.group is None:
            return nullcontext()
        return cab_hf.context_parallel(
            model, self.group, block=self.block, regather_kv=self.regather_kv
        )

    def sharded(self, batch: Batch) -> Batch:
        """What this process computes of a batch that all of its replica have, [B, N] tensors.

        Tensors [1, n], each token and each label in one process of the replica; labels of padding
        are -100. Rows stand one behind the other, for documents see themselves alone.
        """
        return batch if self.group is None else sharded(batch, self.group, self.block)

    def positions(self, sharded: Batch) -> Tensor:
        """int64 [B, n], where the tokens of a sharded batch stand in their documents.

        Without padding, so that those of all processes are the sequence's, each once.
        """
        if self.group is None:
            return sharded["position_ids"]
        lengths = lengths_between(sharded["cu_seq_lens_q"])
        layout = layout_of(lengths, self.group.size(), self.block)
        return sharded["position_ids"][:, layout.real[self.group.rank()]]


def block_of(model: nn.Module) -> int:
    """Tokens of which the chunks of processes are whole multiples."""
    config = cab_config(model.config.get_text_config())
    return math.lcm(EXACT_BLOCK, config.query_block, config.key_block)


def sharded(batch: Batch, group: ProcessGroup, block: int) -> Batch:
    """A process's tokens of a batch [B, N] whose labels, if it has any, are shifted already."""
    row = {name: each.reshape(1, -1) for name, each in batch.items()}
    if "labels" in row:
        row["shift_labels"] = row.pop("labels")
    mine = shard(row, group, block)
    return {name: mine[name] for name in (*INPUTS, "labels") if name in mine}
