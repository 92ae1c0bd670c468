"""Selection of key blocks by sampled queries, the method of the default predictor.

`reference` defines the selection in plain PyTorch. On a GPU, `api.select_blocks` runs these stages:

1. `gather`: quantise the keys, and gather the sampled queries of every query block.
2. `score`: for every sampled query, compute the maximum logit per key block, and the log-sum-exp
   over key blocks.
3. `threshold`: convert logits to attention shares, compare their mean and maximum per query block
   with the thresholds, and set one bit per selected key block.
4. `compact`: convert the bits to lists of block indices. If ``max_density`` is below 1, list only
   the blocks with the highest scores.

`tiles.plan_tiles` computes the sizes of the launches.
"""

from cab_hf.selection.api import QuantizedKeys, quantize_keys, select_blocks

__all__ = ["QuantizedKeys", "quantize_keys", "select_blocks"]
