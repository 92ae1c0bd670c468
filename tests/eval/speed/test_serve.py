"""``speed serve``: traces of requests, percentiles by hand, runs, and error rows."""

import operator
import queue
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from bench import SMALL_BLOCK_ASSIGNMENTS, TINY_MODEL_SIZES, format_tables, measure_sample
from marks import NEEDS_SERVING

from cab_hf.batching import batch
from cab_hf.eval.speed.model import make_random_model
from cab_hf.eval.speed.serve import Request, Serve, Settings, make_trace, serve, summarise_requests


def make_tiny_settings(**setting_fields):
    """Return settings of a tiny model and a short trace; ``setting_fields`` replaces fields."""
    trace_fields = {
        "lengths": (96, 192),
        "requests": ("2",),
        "cab": SMALL_BLOCK_ASSIGNMENTS,
        "warm_up": 1,
    }
    return Settings(device="cpu", **{**TINY_MODEL_SIZES, **trace_fields, **setting_fields})


def make_served_request(length, arrival_s, first_token_s, last_token_s):
    """Return a served request with the times of its arrival, first token and last token."""
    time_fields = {"arrived": arrival_s, "first": first_token_s, "last": last_token_s}
    return {"length": length, **time_fields, "preempted": False}


def test_trace_depends_on_seed():
    num_requests_by_length = {100: 30, 300: 3}
    trace = make_trace(num_requests_by_length, 5, 1000, requests_per_second=2.0)
    assert (
        trace
        == make_trace(num_requests_by_length, 5, 1000, requests_per_second=2.0)
        != make_trace(num_requests_by_length, 6, 1000, requests_per_second=2.0)
    )
    lengths = [len(request.prompt) for request in trace]
    assert {
        length: lengths.count(length) for length in num_requests_by_length
    } == num_requests_by_length
    assert lengths != sorted(lengths)
    assert {request.arrival_s for request in make_trace({10: 5}, 0, 1000)} == {0.0}


@pytest.mark.parametrize("num_shared_tokens", [0, 7])
def test_prompts_share_prefix_of_requested_length(num_shared_tokens):
    prompts = [
        request.prompt
        for request in make_trace(
            {20: 1, 50: 1, 30: 1}, 3, 1000, num_shared_tokens=num_shared_tokens
        )
    ]
    assert len({tuple(prompt[:num_shared_tokens]) for prompt in prompts}) == 1
    assert len({prompt[num_shared_tokens] for prompt in prompts}) == 3
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


def test_summary_by_hand():
    served_requests = [
        make_served_request(100, 0.0, 1.0, 3.0),
        make_served_request(300, 1.0, 4.0, 5.0),
    ]
    summary = summarise_requests(served_requests, num_new_tokens=5)
    assert (summary["total_s"], summary["prompt_tokens_s"], summary["output_tokens_s"]) == (
        5,
        80,
        2,
    )
    assert (summary["ttft_p50"], summary["ttft_p99"]) == pytest.approx((2.0, 2.98))
    # the four tokens after the first take 2 s and 1 s
    assert (summary["tpot_p50"], summary["tpot_p99"]) == pytest.approx((375.0, 497.5))


class FakeManager:
    """A fake manager that returns all tokens of a request at once, with times 1 s apart."""

    def __init__(self):
        self.outputs = queue.Queue()

    def add_request(self, prompt, name, new_tokens, streaming, record_timestamps):
        assert streaming and record_timestamps
        start_time = time.perf_counter()
        for num_tokens in range(1, new_tokens + 1):
            output = SimpleNamespace(request_id=name, error=None, created_time=start_time)
            output.timestamps = [start_time + seconds for seconds in range(1, num_tokens + 1)]
            output.is_finished = partial(operator.eq, num_tokens, new_tokens)
            self.outputs.put(output)

    def get_result(self, timeout):
        with suppress(queue.Empty):
            return self.outputs.get(timeout=timeout)

    def is_running(self):
        return True


def test_token_times_are_recorded():
    requests = [Request(0.0, [1, 2]), Request(0.05, [1, 2, 3])]
    first_result, second_result = serve(FakeManager(), requests, 3)
    assert (first_result["length"], second_result["length"]) == (2, 3)
    assert second_result["arrived"] >= 0.05
    for result in (first_result, second_result):
        assert result["first"] >= result["arrived"] + 1
        assert result["last"] - result["first"] == pytest.approx(2, abs=1e-4)
        assert not result["preempted"]


@NEEDS_SERVING
def test_preempted_requests_are_counted():
    settings = make_tiny_settings(blocks=26, new_tokens=40, implementations=("cab",))
    (row,) = Serve.rows([measure_sample(Serve, settings, settings.list_requested_cases()[0])], {})
    assert row["error"] is None and 0 < row["preempted"] < 4
    # for preempted requests too, ``first`` is the time of the first token before the preemption
    assert all(request["first"] < request["last"] for request in row["served"])


def make_sample(implementation, served_requests, error=None):
    """Return a sample of a run; ``served_requests`` is None if the run failed with ``error``."""
    result_fields = {"new_tokens": 5, "longest": 300, "ran_as": None, "error": error}
    result_fields |= dict.fromkeys(("density", "peak_gib", "cache_gib")) | {"batching": {}}
    return {"implementation": implementation, "served": served_requests, **result_fields}


def test_tables_without_served_request_show_errors():
    rows = Serve.rows([make_sample("cab", None, error="out of memory")], {})
    assert "By length" not in Serve.tables(rows)
    assert "out of memory" in format_tables(Serve, rows)


def test_rows_are_compared_with_fastest_dense():
    samples = [
        make_sample(
            "sdpa",
            [make_served_request(100, 0.0, 4.0, 8.0), make_served_request(300, 0.0, 8.0, 12.0)],
        ),
        make_sample(
            "flash_attention_3",
            [make_served_request(100, 0.0, 2.0, 4.0), make_served_request(300, 0.0, 4.0, 6.0)],
        ),
        make_sample(
            "cab",
            [make_served_request(100, 0.0, 1.0, 2.0), make_served_request(300, 0.0, 2.0, 3.0)],
        ),
        make_sample("cab-always", None, error="out of memory"),
    ]
    rows = Serve.rows(samples, {})
    *_, cab_row, failed_row = rows
    assert (cab_row["baseline"], cab_row["over_best"]) == ("flash_attention_3", 2.0)
    assert (cab_row["ttft_over_best"], cab_row["tpot_over_best"]) == (2.0, 2.0)
    assert (failed_row["total_s"], failed_row["over_best"]) == (None, None)
    assert "out of memory" in format_tables(Serve, rows)


@NEEDS_SERVING
def test_generation_error_is_row_error(monkeypatch):
    def raise_out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")

    monkeypatch.setattr(batch, "attend_batch", raise_out_of_memory)
    row = measure_sample(Serve, make_tiny_settings(), {"implementation": "cab"})
    assert row["error"] == "out of memory: tried to allocate 4.00 GiB"
    assert (
        row["served"] is None
        and make_random_model(make_tiny_settings()).config._attn_implementation == "sdpa"
    )


@NEEDS_SERVING
@pytest.mark.parametrize(("num_experts", "model_type"), [(0, "llama"), (4, "qwen3_moe")])
def test_trace_is_served_with_and_without_experts(num_experts, model_type):
    settings = make_tiny_settings(
        experts=num_experts, experts_per_token=2, implementations=("cab",)
    )
    assert make_random_model(settings).config.model_type == model_type
    row = measure_sample(Serve, settings, settings.list_requested_cases()[0])
    assert row["error"] is None and len(row["served"]) == 4


def test_flops_count_experts_of_a_token():
    def compute_mlp_flops(**expert_fields):
        settings = make_tiny_settings(layers=1, hidden=8, intermediate=32, **expert_fields)
        settings_with_small_mlp = make_tiny_settings(layers=1, hidden=8, intermediate=1)
        return (settings.count_flops(1) - settings_with_small_mlp.count_flops(1)) / 2 + 3 * 8

    assert compute_mlp_flops() == 3 * 8 * 32
    # two experts of a token, and a router with four rows
    assert compute_mlp_flops(experts=4, experts_per_token=2) == 2 * 3 * 8 * 32 + 4 * 8


def test_quantization_without_vllm_is_refused():
    with pytest.raises(ValueError, match=r"quantization must be empty with engine transformers"):
        make_tiny_settings(quantization="fp8")


def test_figure_is_drawn_if_no_request_was_served(tmp_path):
    Serve.draw(tmp_path / "figure.png", [{"implementation": "cab", "served": None}])
    assert (tmp_path / "figure.png").stat().st_size > 0
