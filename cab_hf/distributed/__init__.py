"""Context parallelism: one text over many processes, each with a shard of its tokens."""

from cab_hf.distributed.choosing import predict, union
from cab_hf.distributed.exchange import RankLost
from cab_hf.distributed.schemes import (
    contiguous_attention,
    ring_attention,
    two_launches,
    zigzag_attention,
)

__all__ = [
    "RankLost",
    "contiguous_attention",
    "predict",
    "ring_attention",
    "two_launches",
    "union",
    "zigzag_attention",
]
