"""How long attention takes on a model's own queries and keys, beside the fastest dense kernel.

A text is read once with dense attention. In each layer, before it goes on, the clock is put to the
q, k and v that the layer has there: to choosing blocks, and to attending them. So all methods are
timed on the same inputs.

Rivals choose in plain PyTorch here, slower than they need be. So choosing takes what their authors
report, a share of dense attention's time; attending is measured as for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cab_hf.call.call import Call
from cab_hf.config import CabConfig
from cab_hf.engines import Workload
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.timing import Bench, GpuBench, Timing
from cab_hf.patches.watching import watched
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext, make_predictor
from cab_hf.route import route
from cab_hf.texts.needles import Tokens

WARM_UP_CALLS = 1
RUNS = 3  # in each layer, whose medians are summed
# predictor -> what choosing takes, over dense attention. Xu et al. 2025 (arXiv 2503.16428), figure
# 5, at one length: 9.3 ms at stride 8 and 3.6 ms at stride 16, and 73.8 ms for dense attention. It
# has 89.6 ms for MInference and 20.8 ms for FlexPrefill too, which are not of those methods' own
# authors, and so not used
REPORTED = {
    "antidiagonal": 9.3 / 73.8,
    "xattention": 9.3 / 73.8,
    "xattention_16": 3.6 / 73.8,
    # of no share that their authors report and we know of: 0, in their favour
    **dict.fromkeys(("flexprefill", "vertical_slash"), 0.0),
    # of no method; these choose by nothing, or by what only attention itself shows
    **dict.fromkeys(("mean_pooled", "oracle", "random", "streaming"), 0.0),
}
FLUSHES = 48  # of the L2 cache before a run: 3 ms, in which its kernels are queued


def rival(config: CabConfig) -> str:
    """The predictor of ``config``, without the share that some have behind a colon."""
    return config.predictor.partition(":")[0]


class LayerBench(GpuBench):
    """A clock for one layer among many: few runs, no CUDA graphs.

    A launch takes as long as a small kernel. So the GPU is kept busy before every run while the
    host queues what is timed, and the events enclose kernels alone, unless the call itself waits.
    """

    def time(self, call: Callable[[], Any], graph: bool = True) -> Timing:
        for _ in range(WARM_UP_CALLS):
            call()
        return Timing(self.by_events(call, RUNS, FLUSHES, torch.cuda.synchronize))


def layer_bench(device: torch.device | str) -> Bench | None:
    """The clock for layers on ``device``; None where times would mean nothing, as on a CPU."""
    return LayerBench(str(device)) if torch.device(device).type == "cuda" else None


class AttentionClock:
    """Times what attention takes in all layers of a model, summed.

    Args:
        bench: what a call is timed by.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._dense: dict[tuple, tuple[str, float]] = {}

    @torch.no_grad()
    def time(self, model: Any, tokens: Tokens, config: CabConfig | None) -> dict[str, Any]:
        """Milliseconds that attention takes in one pass over ``tokens``.

        Args:
            config: how blocks are chosen; None for dense attention alone.

        Returns:
            ``predict_ms``, choosing blocks, measured or by `REPORTED`; ``attend_ms``, attending
            them, and exact attention where layers are exact; ``dense_ms``, the fastest dense kernel
            in all layers; ``dense_kernel``, its name; and where choosing is not measured
            ``predict_reported``, the share by which it counts. Layers with a sliding window are
            left out of all times.
        """
        spent = {"predict_ms": 0.0, "attend_ms": 0.0, "dense_ms": 0.0, "dense_kernel": None}
        reported = None if config is None else REPORTED.get(rival(config))
        if reported is not None:
            spent["predict_reported"] = reported
        shared_state: dict[Any, Any] = {}

        def look(call: Call) -> None:
            if call.text.window is not None:
                return
            spent["dense_kernel"], dense_ms = self.dense(call.q, call.k, call.v, call.scale)
            batch, _, length, _ = call.q.shape
            layer = call.context(Spans.causal(batch, length, length, call.q.device), shared_state)
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
        """The fastest dense kernel and its ms, measured once for tensors of one shape.

        Raises:
            RuntimeError: where no dense kernel runs.
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
    """What chooses blocks in a layer, and what attends them; None where the layer is exact."""
    q, k, v = call.q, call.k, call.v
    work = Workload.of(q, k, v, (config.query_block, config.key_block))
    way = route(call.text, config, work, sparse=True, layer=call.layer)
    if way.kind != "sparse":
        return None
    predict = partial(make_predictor(config), q, k, layer)
    # before the clock starts: what spans keep is made once for all layers of a pass
    plan = predict()
    return predict, partial(way.engine.attention, q, k, v, plan, layer.scale)
