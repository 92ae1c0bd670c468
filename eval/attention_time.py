"""The time of attention on a model's own queries and keys, compared with dense kernels.

The model reads a text once with dense attention. In each layer, selecting blocks and attending are
timed on the layer's q, k and v before the layer goes on. All methods are therefore timed on the
same inputs.

Baselines select blocks in plain PyTorch here, which is slower than necessary. Their selection
therefore counts as the share of dense attention's time that their authors report. Attending is
measured for all methods.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cab_hf.call.call import Call
from cab_hf.config import CabConfig
from cab_hf.data.needles import Tokens
from cab_hf.engines import Workload
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.timing import Bench, GpuBench, Timing
from cab_hf.patches.watching import watched
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor
from cab_hf.route import route

WARM_UP_CALLS = 1
RUNS = 3  # runs in each layer; their medians are summed
# predictor -> time of block selection relative to dense attention. Xu et al. 2025 (arXiv
# 2503.16428), figure 5, at one length: 9.3 ms at stride 8 and 3.6 ms at stride 16, and 73.8 ms for
# dense attention. The figure also has 89.6 ms for MInference and 20.8 ms for FlexPrefill. These are
# not used, because the authors of these methods did not report them.
REPORTED = {
    "antidiagonal": 9.3 / 73.8,
    "xattention": 9.3 / 73.8,
    "xattention_16": 3.6 / 73.8,
    # 0, in their favour, because we know of no share that their authors report
    **dict.fromkeys(("flexprefill", "vertical_slash"), 0.0),
    # 0, because these select by nothing, or by attention itself
    **dict.fromkeys(("mean_pooled", "oracle", "random", "streaming"), 0.0),
}
FLUSHES = 48  # flushes of the L2 cache before a run: 3 ms, in which its kernels are queued


def rival(config: CabConfig) -> str:
    """Return the predictor of ``config`` without a share after a colon."""
    return config.predictor.partition(":")[0]


class LayerBench(GpuBench):
    """A clock for one layer among many: few runs, no CUDA graphs.

    Launching takes as long as a small kernel. The GPU is therefore kept busy before every run while
    the host queues the timed calls. The events then enclose kernels only, unless the call itself
    waits.
    """

    def time(self, call: Callable[[], Any], graph: bool = True) -> Timing:
        for _ in range(WARM_UP_CALLS):
            call()
        return Timing(self.by_events(call, RUNS, FLUSHES, torch.cuda.synchronize))


def layer_bench(device: torch.device | str) -> Bench | None:
    """Return the clock for layers on ``device``; None if times are meaningless, as on a CPU."""
    return LayerBench(str(device)) if torch.device(device).type == "cuda" else None


class AttentionClock:
    """A clock for the attention of all layers of a model, summed.

    Args:
        bench: the clock of a call.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._dense: dict[tuple, tuple[str, float]] = {}

    @torch.no_grad()
    def time(self, model: Any, tokens: Tokens, config: CabConfig | None) -> dict[str, Any]:
        """Return the milliseconds of attention in one pass over ``tokens``.

        Args:
            model: the model.
            tokens: the tokens to read.
            config: settings for selecting blocks; None for dense attention alone.

        Returns:
            ``predict_ms``, selecting blocks, measured or taken from `REPORTED`; ``attend_ms``,
            attending to the blocks, and exact attention in exact layers; ``dense_ms``, the fastest
            dense kernel in all layers; ``dense_kernel``, its name; and, if the selection is not
            measured, ``predict_reported``, its share. Layers with a sliding window are left out of
            all times.
        """
        spent = {"predict_ms": 0.0, "attend_ms": 0.0, "dense_ms": 0.0, "dense_kernel": None}
        reported = None if config is None else REPORTED.get(rival(config))
        if reported is not None:
            spent["predict_reported"] = reported
        shared_state: dict[Any, Any] = {}

        def look(call: Call) -> None:
            if call.mask.window is not None:
                return
            spent["dense_kernel"], dense_ms = self.dense(call.q, call.k, call.v, call.scale)
            batch, _, length, _ = call.q.shape
            layer = call.context(
                KeyRanges.causal(batch, length, length, call.q.device), shared_state
            )
            calls = None if config is None else sparse_calls(call, layer, config)
            predict_ms, attend_ms = 0.0, dense_ms
            if calls is not None:
                predict, attend = calls
                measured = reported is None
                predict_ms = self.bench.time(predict).ms if measured else reported * dense_ms
                attend_ms = self.bench.time(attend).ms
            spent["dense_ms"] += dense_ms
            spent["predict_ms"] += predict_ms
            spent["attend_ms"] += attend_ms

        ids = torch.tensor([tokens], device=model.device)
        with watched(model, look):
            model(ids, use_cache=False, logits_to_keep=1)
        return spent

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[str, float]:
        """Return the fastest dense kernel and its ms, measured once per shape of tensors.

        Raises:
            RuntimeError: no dense kernel runs.
        """
        key = (q.shape, k.shape, q.dtype)
        if key not in self._dense:
            result = dense.measure(q, k, v, scale, self.bench)
            if not result["baselines"]:
                raise RuntimeError(f"no dense kernel runs here: {result['not_measured']}")
            self._dense[key] = min(result["baselines"].items(), key=lambda each: each[1])
        return self._dense[key]


def sparse_calls(
    call: Call, layer: LayerContext, config: CabConfig
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Return functions that select blocks and attend in a layer; None if the layer is exact."""
    q, k, v = call.q, call.k, call.v
    work = Workload.of(q, k, v, (config.query_block, config.key_block))
    chosen_route = route(call.mask, config, work, sparse=True, layer=call.layer)
    if chosen_route.method != "sparse":
        return None
    predict = partial(make_predictor(config), q, k, layer)
    # before the clock starts: all layers of a pass share what ranges cache
    plan = predict()
    return predict, partial(chosen_route.engine.attention, q, k, v, plan, layer.scale)
