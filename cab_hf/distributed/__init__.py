"""Context parallelism: each rank holds a shard of the tokens of one sequence."""

from cab_hf.distributed.batch import shard, unshard, whole_cache
from cab_hf.distributed.choosing import predict, union
from cab_hf.distributed.context import context_parallel
from cab_hf.distributed.exchange import RankLost
from cab_hf.distributed.zigzag import zigzag_attention

__all__ = [
    "RankLost",
    "context_parallel",
    "predict",
    "shard",
    "union",
    "unshard",
    "whole_cache",
    "zigzag_attention",
]
