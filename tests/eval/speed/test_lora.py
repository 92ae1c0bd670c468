"""``speed lora``: a step learns, its operations by hand, and a whole run."""

import weakref

import pytest
import torch
from bench import FakeBench, sample_of

from cab_hf.eval.speed import lora
from cab_hf.eval.speed.lora import LoraStep, Settings
from cab_hf.finetune.offload import Offload

TINY = {"layers": 2, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 8}
SMALL = ("query_block=32", "key_block=16", "local_blocks=1", "min_length=0", "dense_tail_blocks=1")
# a case of one process
ONE = {"spread": "alone", "world": 1, "sought": False}


def tiny(**more):
    return Settings(device="cpu", **{**TINY, **more})


class Clock(FakeBench):
    def wall(self, call, runs, warm_up_calls):
        assert warm_up_calls == 0
        call()
        return 500.0, 2.0


def test_a_step_learns_and_its_gradients_are_gone_behind_it():
    settings = tiny(lengths=(64,), vocab=32)
    objective, optimizer, _ = lora.trainee(settings)
    batch = lora.batch_of(settings, 64)
    with lora.training(settings, 64, "sdpa") as (call, _):
        before = objective(batch).item()
        for _ in range(20):
            call(64)
        assert objective(batch).item() < before - 0.01
    learnt = optimizer.param_groups[0]["params"]
    assert all(p.grad is None for p in learnt) and len(learnt) == 2 * 2 * 4
    assert all(
        layer.gradient_checkpointing for layer in objective.model.base_model.model.model.layers
    )


def test_operations_by_hand():
    settings = tiny(lengths=(64,), vocab=11, rank=3)
    flops = lora.useful_flops(lora.trainee(settings).cost, 64)
    # frozen: q and o 24 x 32, k and v 24 x 16, three of 24 x 40 in the MLP; the head
    frozen = 2 * (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40) + 24 * 11
    adapters = 2 * 3 * 2 * ((24 + 32) + (24 + 16))
    attention = 2 * 12 * 32 * 64 * 65 / 2
    assert flops(1.0) == 64 * (4 * frozen + 6 * adapters) + attention
    assert flops(1.0) - flops(0.25) == 0.75 * attention


def test_a_row_has_its_ceiling_by_hand():
    settings = tiny(lengths=(192,), cab=SMALL)
    case = {"length": 192, "implementation": "cab", **ONE}
    row = sample_of(LoraStep, settings, case, Clock())
    flops = lora.useful_flops(lora.trainee(settings).cost, 192)
    assert (row["ms"], row["peak_gib"], row["error"]) == (500.0, 2.0, None)
    assert 0 < row["density"] < 0.7 and "sparse" in row["ran_as"]
    assert row["ceiling"] == pytest.approx(flops(1.0) / flops(row["density"]))
    assert row["tflops"] == pytest.approx(flops(row["density"]) / 0.5 / 1e12)


def test_what_warms_up_does_not_count(monkeypatch):
    monkeypatch.setattr(lora, "WARM_UP_TOKENS", 16)
    settings = tiny(lengths=(192,), cab=SMALL)
    case = {"length": 192, "implementation": "cab", **ONE}
    short = sample_of(LoraStep, settings, case, Clock())["density"]
    monkeypatch.setattr(lora, "WARM_UP_TOKENS", 192)
    assert sample_of(LoraStep, settings, case, Clock())["density"] == pytest.approx(short)


def test_a_long_step_is_computed_in_tiles_with_offloaded_checkpoints():
    settings = tiny(lengths=(192,), cab=SMALL, tile_tokens=50, offload_layers=1)
    case = {"length": 192, "implementation": "cab", **ONE}
    calls = []
    mlp = lora.layers_of(settings)[0].mlp
    handle = mlp.act_fn.register_forward_hook(
        lambda _, inputs, __: calls.append(inputs[0].shape[1])
    )
    row = sample_of(LoraStep, settings, case, Clock())
    assert (row["tile_tokens"], row["offloaded"], row["host_gib"]) == (50, 1, 0.25)
    # forward and backward, of what warms up and of what is timed
    assert sorted(calls) == sorted([50, 50, 50, 42] * 4)
    # the next row is told anew
    calls.clear()
    settings = tiny(lengths=(192,), cab=SMALL, tile_tokens=0, offload_layers=0)
    row = sample_of(LoraStep, settings, case, Clock())
    handle.remove()
    assert (row["tile_tokens"], row["offloaded"], row["host_gib"]) == (0, 0, 0.0)


def test_a_step_gives_its_pinned_memory_back_before_the_next_takes_its_own(monkeypatch):
    settings, owners, seen = tiny(lengths=(192,)), weakref.WeakSet(), []
    pinned = Offload._pinned

    def noted(self):
        owners.add(self)
        seen.append(len(owners))
        return pinned(self)

    monkeypatch.setattr(Offload, "_pinned", noted)
    for _ in range(2):
        lora.save_memory(settings, 192, 50, 1)
    assert seen == [1, 1]
    lora.save_memory(settings, 192, 0, 0)


def test_a_kernel_without_gradients_is_a_row_with_its_reason(monkeypatch):
    def forward_only(q, k, v, scale):
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )

    baseline = lora.dense.Baseline(lambda: forward_only)
    monkeypatch.setattr(lora.dense, "ON_CPU", {"FA3": baseline})
    settings = tiny(lengths=(96,), implementations=("FA3",))
    assert "no backward" in sample_of(LoraStep, settings, {**settings.asked()[0], **ONE})["error"]
