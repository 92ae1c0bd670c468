"""Selection of key blocks by sampled queries, the method of the default predictor.

`reference` defines the selection in plain PyTorch. On a GPU, `api.select_blocks` runs these stages:

1. `gather`: quantise the keys, and gather the sampled queries of every query block.
2. `score`: the maximum logit per key block and the log-sum-exp, for every sampled query.
3. `threshold`: shares of attention, their mean and maximum per query block, one bit per key block.
4. `compact`: index lists from the bitmap, or from scores if rows are capped.

`tiles.plan_tiles` computes the sizes of the launches.
"""

from cab_hf.selection.api import QuantizedKeys, quantize_keys, select_blocks

__all__ = ["QuantizedKeys", "quantize_keys", "select_blocks"]
