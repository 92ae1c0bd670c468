"""``speed lora``: training steps, FLOPs by hand, ranks, and searched lengths."""

import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bench import BLOCKS, TINY, Clock, sample_of, torchrun

from cab_hf.eval.speed import dense, lora, model
from cab_hf.eval.speed.lora import SPREADS, LoraStep, Settings
from cab_hf.eval.speed.rank_group import RankGroup
from cab_hf.eval.speed.runner import next_length
from cab_hf.finetune.offload import Offload

SMALL = (*BLOCKS, "min_length=0")
# a case of one process
ONE = {"spread": "alone", "world": 1, "sought": False}
CASE = {"length": 192, "implementation": "cab", **ONE}


def tiny(**more):
    return Settings(device="cpu", **{**TINY, **more})


def test_step_lowers_loss_and_clears_gradients():
    settings = tiny(lengths=(64,), vocab=32)
    train_state, batch = lora.train_state(settings), lora.batch_of(settings, 64)
    with lora.training(settings, 64, "sdpa") as (call, _):
        before = train_state.objective(batch).item()
        for _ in range(20):
            call(64)
        assert train_state.objective(batch).item() < before - 0.01
    trainable = train_state.trainable
    assert all(p.grad is None for p in trainable) and len(trainable) == 2 * 2 * 4
    assert all(layer.gradient_checkpointing for layer in model.random_model(settings).model.layers)


def test_operations_by_hand():
    settings = tiny(lengths=(64,), vocab=11, rank=3)
    cost = lora.train_state(settings).cost
    # frozen: q and o 24 x 32, k and v 24 x 16, three of 24 x 40 in the MLP; the head
    frozen = 2 * (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40) + 24 * 11
    adapters = 2 * 3 * 2 * ((24 + 32) + (24 + 16))
    attention = 2 * 12 * 32 * 64 * 65 / 2
    assert lora.step_flops(cost, 64) == 64 * (4 * frozen + 6 * adapters) + attention
    assert lora.step_flops(cost, 64) - lora.step_flops(cost, 64, 0.25) == 0.75 * attention


def test_lora_row_by_hand(monkeypatch):
    settings = tiny(lengths=(192,), cab=SMALL)
    row = sample_of(LoraStep, settings, CASE, Clock())
    cost = lora.train_state(settings).cost
    assert (row["ms"], row["peak_gib"], row["error"]) == (500.0, 2.0, None)
    assert 0 < row["density"] < 0.7 and "sparse" in row["ran_as"]
    done = lora.step_flops(cost, 192, row["density"])
    assert row["ceiling"] == pytest.approx(lora.step_flops(cost, 192) / done)
    assert row["tflops"] == pytest.approx(done / 0.5 / 1e12)
    # warm-up steps do not count
    monkeypatch.setattr(lora, "WARM_UP_TOKENS", 16)
    again = sample_of(LoraStep, settings, CASE, Clock())
    assert again["density"] == pytest.approx(row["density"])


def test_long_step_uses_tiles_and_offload():
    settings = tiny(lengths=(192,), runs=1, cab=SMALL, tile_tokens=50, offload_layers=1)
    calls = []
    mlp = model.random_model(settings).model.layers[0].mlp
    handle = mlp.act_fn.register_forward_hook(lambda _, given, __: calls.append(given[0].shape[1]))
    row = sample_of(LoraStep, settings, CASE, Clock())
    assert (row["tile_tokens"], row["offloaded"], row["host_gib"]) == (50, 1, 0.25)
    # forward and recompute, in the warm-up and in the timed step
    assert sorted(calls) == sorted([50, 50, 50, 42] * 4)
    # the next row is described again
    settings = tiny(lengths=(192,), cab=SMALL, tile_tokens=0, offload_layers=0)
    row = sample_of(LoraStep, settings, CASE, Clock())
    handle.remove()
    assert (row["tile_tokens"], row["offloaded"], row["host_gib"]) == (0, 0, 0.0)


def test_pinned_memory_is_freed_before_next_step(monkeypatch):
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


def test_kernel_without_backward_has_error_row(monkeypatch):
    def forward_only(q, k, v, scale):
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )

    monkeypatch.setattr(dense, "ON_CPU", {"FA3": dense.Baseline(lambda: forward_only)})
    settings = tiny(lengths=(96,), implementations=("FA3",))
    assert "no backward" in sample_of(LoraStep, settings, {**settings.asked()[0], **ONE})["error"]


@pytest.mark.slow
def test_lora_run_of_two_ranks(tmp_path):
    sizes = [word for name, x in TINY.items() for word in ("--" + name.replace("_", "-"), str(x))]
    words = [*sizes, "--device", "cpu", "--lengths", "600", "--runs", "1", "--max-density", "0.2"]
    words += [word for each in SMALL for word in ("--cab", each)]
    words += ["--implementations", "sdpa,cab_dense,cab", "--out", str(tmp_path / "run")]
    done = torchrun("-m", "cab_hf.eval", "speed", "lora", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    rows = results["rows"]
    assert results["provenance"]["settings"]["worlds"] == [2]
    ways = ("sdpa", "cab_dense", "cab")
    # a sharded sequence needs an implementation with context parallelism
    asked = [(how, way) for how in SPREADS for way in (ways[1:] if how == "cp" else ways)]
    assert [(row["spread"], row["implementation"]) for row in rows] == asked
    assert [row["world"] for row in rows] == [1] * 3 + [2] * 8
    alone = {row["implementation"]: row for row in rows[:3]}
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["fits"]
        one = alone[row["implementation"]]
        # per rank: half of a sequence, or its own sequence
        share = 0.5 if row["spread"] == "cp" else 1.0
        assert row["tokens_s"] == pytest.approx(share * 600 / row["ms"] * 1e3)
        assert row["efficiency"] == pytest.approx(share * one["ms"] / row["ms"])
        # ranks choose as one does
        assert row["density"] == pytest.approx(one["density"], rel=0.1)
        assert (row["density"] < 1) == (row["implementation"] == "cab")
    (sharded,) = (row for row in rows if row["spread"] == "cp" and row["implementation"] == "cab")
    assert sharded["baseline"] == "cab_dense"
    # of the same text, every query being on one rank
    assert sharded["density"] == pytest.approx(alone["cab"]["density"], rel=1e-6)


def test_single_rank_is_refused(one_process, tmp_path):
    measured = LoraStep(tiny(spread=SPREADS, out=str(tmp_path)), RankGroup(dist.group.WORLD))
    with pytest.raises(ValueError, match="torchrun started 1; give it --nproc_per_node=2"):
        measured.over_ranks()


def test_efficiency_compares_with_one_rank_of_same_length():
    def sample(length, way, how, world, ms):
        place = {"length": length, "implementation": way, "spread": how, "world": world}
        return {**LoraStep.ADDED, **place, "ms": ms, "density": 1.0, "ceiling": 1.0}

    rows = LoraStep.rows(
        [
            sample(1000, "cab", "alone", 1, 100.0),
            sample(1000, "cab_dense", "alone", 1, 200.0),
            sample(2000, "cab", "alone", 1, 400.0),
            sample(1000, "cab", "ddp", 2, 125.0),
            sample(2000, "cab", "cp", 2, 250.0),
            sample(2000, "cab_dense", "cp", 2, 1000.0),
            sample(1000, "cab", "fsdp2", 4, 160.0),
        ],
        {},
    )
    actual = {(r["spread"], r["implementation"], r["length"]): r for r in rows}
    sharded = actual["cp", "cab", 2000]
    assert actual["ddp", "cab", 1000]["efficiency"] == pytest.approx(100 / 125)
    assert actual["ddp", "cab", 1000]["tokens_s"] == pytest.approx(8000)
    assert sharded["efficiency"] == pytest.approx(400 / 250 / 2)
    assert actual["fsdp2", "cab", 1000]["tokens_s"] == pytest.approx(1000 / 0.16)
    # no single rank was measured at this length
    assert actual["cp", "cab_dense", 2000]["efficiency"] is None
    assert (sharded["baseline"], sharded["over_best"]) == ("cab_dense", 4.0)
    said = LoraStep.readings(rows)
    assert any("on 2 ranks by cp cab is 4.00× as fast as cab_dense" in each for each in said)


@pytest.mark.parametrize("limit", [0, 63, 64, 200, 1000, 6399, 6400, 100_000])
@pytest.mark.parametrize("asked", [(), (100,), (100, 3000)])
@pytest.mark.parametrize("likely", [(), (30, 60), (900, 1100)])
def test_next_length_finds_longest_that_fits(limit, asked, likely):
    tried = {length: length <= limit for length in asked}
    for _ in range(40):
        length = next_length(tried, 64, likely)
        if length is None:
            break
        assert length % 64 == 0 and length > 0 and length not in tried
        tried[length] = length <= limit
    assert length is None
    fitting = [n for n, fits in tried.items() if fits]
    assert max(fitting, default=0) // 64 == limit // 64


def test_step_search_covers_every_implementation(monkeypatch):
    """Search for the longest step on a GPU that fits 300 tokens."""
    monkeypatch.setattr(lora, "LONGEST", 0)
    experiment = LoraStep(tiny(lengths=(96,), implementations=("sdpa", "cab"), longest=True))
    experiment.bench = SimpleNamespace(room=lambda: 1.0)
    samples = []
    for case in experiment.cases(samples):
        samples.append({**case, "fits": case["length"] <= 300})
    for way in ("sdpa", "cab"):
        tried = {x["length"]: x["sought"] for x in samples if x["implementation"] == way}
        assert tried == {96: False, 128: True, 256: True, 512: True, 384: True, 320: True}


def test_step_search_starts_below_estimate():
    experiment = LoraStep(tiny(lengths=(96,), implementations=("cab",), longest=True))
    experiment.bench = SimpleNamespace(room=lambda: 0.25)
    here = {"spread": "alone", "world": 1, "implementation": "cab"}
    estimate = experiment.estimated(here)
    room = lora.room_of(0.25)
    steps = (experiment.fitted(here, n, room)[1].memory for n in (estimate, estimate + 64))
    assert list(map(room.holds, steps)) == [True, False]
    sought = next(x for x in experiment.cases([]) if x["sought"])
    assert sought["length"] == int(0.9 * estimate) // 64 * 64


def test_qlora_step_packs_weights_in_four_bits():
    functional = pytest.importorskip("bitsandbytes.functional")
    settings = tiny(lengths=(96,), cab=SMALL, hidden=64, intermediate=128, qlora=True)
    plain = model.random_model(replace(settings, qlora=False)).model.layers[0].mlp.down_proj
    first = lora.train_state(settings).objective.model.get_base_model().model.layers[0]
    packed = first.mlp.down_proj.weight
    assert packed.numel() * packed.element_size() == plain.weight.numel() // 2
    # weights after rounding to NF4
    unpacked = functional.dequantize_4bit(packed.data, packed.quant_state)
    assert (unpacked - plain.weight).abs().max() < 0.2 * plain.weight.abs().max()
    row = sample_of(LoraStep, settings, CASE | {"length": 96}, Clock())
    assert row["error"] is None and row["fits"]
    lora.train_state.cache_clear()
    model.forget_model()


def test_out_of_memory_step_leaves_no_gradients(monkeypatch):
    def full(backward, trainable, optimizer, tokens):
        # a step that has begun
        for parameter in trainable:
            parameter.grad = torch.ones_like(parameter)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")

    monkeypatch.setattr(lora, "train_step", full)
    settings = tiny(lengths=(192,), cab=SMALL)
    row = sample_of(LoraStep, settings, CASE, Clock())
    assert row["fits"] is False and row["error"].startswith("out of memory")
    assert all(p.grad is None for p in lora.train_state(settings).trainable)
