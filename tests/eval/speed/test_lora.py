"""``speed lora``: training steps, operations by hand, ranks, and searched lengths."""

import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bench import (
    SMALL_BLOCK_ASSIGNMENTS,
    TINY_MODEL_SIZES,
    WallTimeBench,
    measure_sample,
    run_torchrun,
)

from cab_hf.eval.speed import dense, lora, model
from cab_hf.eval.speed.lora import PARALLELISMS, LoraStep, Settings
from cab_hf.eval.speed.rank_group import RankGroup
from cab_hf.eval.speed.runner import choose_next_length
from cab_hf.finetune.offload import Offload

SMALL_BLOCK_ASSIGNMENTS = (*SMALL_BLOCK_ASSIGNMENTS, "min_length=0")
# fields of a case of one process
ONE_PROCESS_FIELDS = {"spread": "alone", "world": 1, "sought": False}
CAB_CASE = {"length": 192, "implementation": "cab", **ONE_PROCESS_FIELDS}


def make_tiny_settings(**setting_fields):
    """Return settings of a tiny model; ``setting_fields`` replaces fields."""
    return Settings(device="cpu", **{**TINY_MODEL_SIZES, **setting_fields})


def test_step_lowers_loss_and_clears_gradients():
    settings = make_tiny_settings(lengths=(64,), vocab=32)
    train_state, batch = lora.make_train_state(settings), lora.make_batch(settings, 64)
    with lora.prepare_training(settings, 64, "sdpa") as (step_call, _):
        loss_before = train_state.objective(batch).item()
        for _ in range(20):
            step_call(64)
        assert train_state.objective(batch).item() < loss_before - 0.01
    trainable_parameters = train_state.trainable_parameters
    assert (
        all(parameter.grad is None for parameter in trainable_parameters)
        and len(trainable_parameters) == 2 * 2 * 4
    )
    assert all(
        layer.gradient_checkpointing for layer in model.make_random_model(settings).model.layers
    )


def test_operations_by_hand():
    settings = make_tiny_settings(lengths=(64,), vocab=11, rank=3)
    cost = lora.make_train_state(settings).cost
    # frozen weights: q and o 24 x 32, k and v 24 x 16, three of 24 x 40 in the MLP, and the LM head
    num_frozen = 2 * (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 40) + 24 * 11
    num_adapter_weights = 2 * 3 * 2 * ((24 + 32) + (24 + 16))
    attention_flops = 2 * 12 * 32 * 64 * 65 / 2
    assert (
        lora.count_step_flops(cost, 64)
        == 64 * (4 * num_frozen + 6 * num_adapter_weights) + attention_flops
    )
    assert (
        lora.count_step_flops(cost, 64) - lora.count_step_flops(cost, 64, 0.25)
        == 0.75 * attention_flops
    )


def test_lora_row_by_hand(monkeypatch):
    settings = make_tiny_settings(lengths=(192,), cab=SMALL_BLOCK_ASSIGNMENTS)
    row = measure_sample(LoraStep, settings, CAB_CASE, WallTimeBench())
    cost = lora.make_train_state(settings).cost
    assert (row["ms"], row["peak_gib"], row["error"]) == (500.0, 2.0, None)
    assert 0 < row["density"] < 0.7 and "sparse" in row["ran_as"]
    flops = lora.count_step_flops(cost, 192, row["density"])
    assert row["ceiling"] == pytest.approx(lora.count_step_flops(cost, 192) / flops)
    assert row["tflops"] == pytest.approx(flops / 0.5 / 1e12)
    # warm-up steps do not change the density
    monkeypatch.setattr(lora, "WARM_UP_TOKENS", 16)
    second_row = measure_sample(LoraStep, settings, CAB_CASE, WallTimeBench())
    assert second_row["density"] == pytest.approx(row["density"])


def test_long_step_uses_tiles_and_offload():
    settings = make_tiny_settings(
        lengths=(192,), runs=1, cab=SMALL_BLOCK_ASSIGNMENTS, tile_tokens=50, offload_layers=1
    )
    tile_lengths = []
    mlp = model.make_random_model(settings).model.layers[0].mlp
    hook_handle = mlp.act_fn.register_forward_hook(
        lambda _, inputs, __: tile_lengths.append(inputs[0].shape[1])
    )
    row = measure_sample(LoraStep, settings, CAB_CASE, WallTimeBench())
    assert (row["tile_tokens"], row["offloaded"], row["host_gib"]) == (50, 1, 0.25)
    # the layer runs forward and again for recomputation, in the warm-up and in the timed step
    assert sorted(tile_lengths) == sorted([50, 50, 50, 42] * 4)
    # a later case without tiles and offloading must not report those of the case before
    settings = make_tiny_settings(
        lengths=(192,), cab=SMALL_BLOCK_ASSIGNMENTS, tile_tokens=0, offload_layers=0
    )
    row = measure_sample(LoraStep, settings, CAB_CASE, WallTimeBench())
    hook_handle.remove()
    assert (row["tile_tokens"], row["offloaded"], row["host_gib"]) == (0, 0, 0.0)


def test_pinned_memory_is_freed_before_next_step(monkeypatch):
    settings, live_offloads, offload_counts = (
        make_tiny_settings(lengths=(192,)),
        weakref.WeakSet(),
        [],
    )
    allocate_chunk = Offload._allocate_chunk

    def record_offload_and_allocate(self):
        live_offloads.add(self)
        offload_counts.append(len(live_offloads))
        return allocate_chunk(self)

    monkeypatch.setattr(Offload, "_allocate_chunk", record_offload_and_allocate)
    for _ in range(2):
        lora.apply_memory_savings(settings, 192, 50, 1)
    assert offload_counts == [1, 1]
    lora.apply_memory_savings(settings, 192, 0, 0)


def test_kernel_without_backward_has_error_row(monkeypatch):
    def attend_without_gradient(q, k, v, scale):
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )

    monkeypatch.setattr(
        dense, "CPU_BASELINES", {"FA3": dense.Baseline(lambda: attend_without_gradient)}
    )
    settings = make_tiny_settings(lengths=(96,), implementations=("FA3",))
    assert (
        "no backward"
        in measure_sample(
            LoraStep, settings, {**settings.list_requested_cases()[0], **ONE_PROCESS_FIELDS}
        )["error"]
    )


@pytest.mark.slow
def test_lora_run_of_two_ranks(tmp_path):
    size_options = [
        option
        for name, value in TINY_MODEL_SIZES.items()
        for option in ("--" + name.replace("_", "-"), str(value))
    ]
    options = [
        *size_options,
        "--device",
        "cpu",
        "--lengths",
        "600",
        "--runs",
        "1",
        "--max-density",
        "0.2",
    ]
    options += [
        option for assignment in SMALL_BLOCK_ASSIGNMENTS for option in ("--cab", assignment)
    ]
    options += ["--implementations", "sdpa,cab_dense,cab", "--out", str(tmp_path / "run")]
    process = run_torchrun(["-m", "cab_hf.eval", "speed", "lora", *options])
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    rows = results["rows"]
    assert results["provenance"]["settings"]["worlds"] == [2]
    implementation_names = ("sdpa", "cab_dense", "cab")
    # sdpa has no context parallelism
    expected = [
        (spread, name)
        for spread in PARALLELISMS
        for name in (implementation_names[1:] if spread == "cp" else implementation_names)
    ]
    assert [(row["spread"], row["implementation"]) for row in rows] == expected
    assert [row["world"] for row in rows] == [1] * 3 + [2] * 8
    one_rank_rows = {row["implementation"]: row for row in rows[:3]}
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["fits"]
        one_rank_row = one_rank_rows[row["implementation"]]
        # with cp, each of two ranks computes half of the sequence, and otherwise a whole sequence
        sequence_share = 0.5 if row["spread"] == "cp" else 1.0
        assert row["tokens_s"] == pytest.approx(sequence_share * 600 / row["ms"] * 1e3)
        assert row["efficiency"] == pytest.approx(sequence_share * one_rank_row["ms"] / row["ms"])
        # every ``spread`` selects about as many blocks as one process
        assert row["density"] == pytest.approx(one_rank_row["density"], rel=0.1)
        assert (row["density"] < 1) == (row["implementation"] == "cab")
    (cp_row,) = (row for row in rows if row["spread"] == "cp" and row["implementation"] == "cab")
    assert cp_row["baseline"] == "cab_dense"
    # with cp, the ranks together compute the same sequence as one process, with the same blocks
    assert cp_row["density"] == pytest.approx(one_rank_rows["cab"]["density"], rel=1e-6)


def test_single_rank_is_refused(single_process_group, tmp_path):
    settings = make_tiny_settings(spread=PARALLELISMS, out=str(tmp_path))
    experiment = LoraStep(settings, RankGroup(dist.group.WORLD))
    with pytest.raises(ValueError, match="torchrun started 1; give it --nproc_per_node=2"):
        experiment.run_on_all_ranks()


def test_efficiency_compares_with_one_rank_of_same_length():
    def make_sample(length, implementation, spread, *, world_size, ms):
        case_fields = {"length": length, "implementation": implementation}
        case_fields |= {"spread": spread, "world": world_size}
        return {**LoraStep.ADDED_DEFAULTS, **case_fields, "ms": ms, "density": 1.0, "ceiling": 1.0}

    rows = LoraStep.rows(
        [
            make_sample(1000, "cab", "alone", world_size=1, ms=100.0),
            make_sample(1000, "cab_dense", "alone", world_size=1, ms=200.0),
            make_sample(2000, "cab", "alone", world_size=1, ms=400.0),
            make_sample(1000, "cab", "ddp", world_size=2, ms=125.0),
            make_sample(2000, "cab", "cp", world_size=2, ms=250.0),
            make_sample(2000, "cab_dense", "cp", world_size=2, ms=1000.0),
            make_sample(1000, "cab", "fsdp2", world_size=4, ms=160.0),
        ],
        {},
    )
    row_by_case = {(row["spread"], row["implementation"], row["length"]): row for row in rows}
    cp_row = row_by_case["cp", "cab", 2000]
    assert row_by_case["ddp", "cab", 1000]["efficiency"] == pytest.approx(100 / 125)
    assert row_by_case["ddp", "cab", 1000]["tokens_s"] == pytest.approx(8000)
    assert cp_row["efficiency"] == pytest.approx(400 / 250 / 2)
    assert row_by_case["fsdp2", "cab", 1000]["tokens_s"] == pytest.approx(1000 / 0.16)
    # one rank was not measured at this length
    assert row_by_case["cp", "cab_dense", 2000]["efficiency"] is None
    assert (cp_row["baseline"], cp_row["over_best"]) == ("cab_dense", 4.0)
    expected_text = "on 2 ranks by cp cab is 4.00× as fast as cab_dense"
    assert any(expected_text in sentence for sentence in LoraStep.summary_sentences(rows))


@pytest.mark.parametrize("max_length", [0, 63, 64, 200, 1000, 6399, 6400, 100_000])
@pytest.mark.parametrize("measured_lengths", [(), (100,), (100, 3000)])
@pytest.mark.parametrize("likely_lengths", [(), (30, 60), (900, 1100)])
def test_next_length_finds_longest_that_fits(max_length, measured_lengths, likely_lengths):
    fits_by_length = {length: length <= max_length for length in measured_lengths}
    for _ in range(40):
        length = choose_next_length(fits_by_length, 64, likely_lengths)
        if length is None:
            break
        assert length % 64 == 0 and length > 0 and length not in fits_by_length
        fits_by_length[length] = length <= max_length
    assert length is None
    fitting_lengths = [length for length, is_fitting in fits_by_length.items() if is_fitting]
    assert max(fitting_lengths, default=0) // 64 == max_length // 64


def test_step_search_covers_every_implementation(monkeypatch):
    """The fake memory fits steps of up to 300 tokens; searched lengths are multiples of 64."""
    monkeypatch.setattr(lora, "MAX_ESTIMATED_TOKENS", 0)
    experiment = LoraStep(
        make_tiny_settings(lengths=(96,), implementations=("sdpa", "cab"), longest=True)
    )
    experiment.bench = SimpleNamespace(available_gib=lambda: 1.0)
    samples = []
    for case in experiment.cases(samples):
        samples.append({**case, "fits": case["length"] <= 300})
    for name in ("sdpa", "cab"):
        implementation_samples = [sample for sample in samples if sample["implementation"] == name]
        is_sought_by_length = {
            sample["length"]: sample["sought"] for sample in implementation_samples
        }
        assert is_sought_by_length == {
            96: False,
            128: True,
            256: True,
            512: True,
            384: True,
            320: True,
        }


def test_step_search_starts_below_estimate():
    experiment = LoraStep(make_tiny_settings(lengths=(96,), implementations=("cab",), longest=True))
    experiment.bench = SimpleNamespace(available_gib=lambda: 0.25)
    case = {"spread": "alone", "world": 1, "implementation": "cab"}
    estimate = experiment.estimate_tokens(case)
    available_memory = lora.get_available_memory(0.25)
    lengths = (estimate, estimate + 64)
    step_memories = (
        experiment.choose_memory_savings(case, length, available_memory)[1].memory
        for length in lengths
    )
    assert list(map(available_memory.can_hold, step_memories)) == [True, False]
    first_case = next(case for case in experiment.cases([]) if case["sought"])
    assert first_case["length"] == int(0.9 * estimate) // 64 * 64


def test_qlora_step_packs_weights_in_four_bits():
    bitsandbytes_functional = pytest.importorskip("bitsandbytes.functional")
    settings = make_tiny_settings(
        lengths=(96,), cab=SMALL_BLOCK_ASSIGNMENTS, hidden=64, intermediate=128, qlora=True
    )
    plain_layer = (
        model.make_random_model(replace(settings, qlora=False)).model.layers[0].mlp.down_proj
    )
    first_layer = lora.make_train_state(settings).objective.model.get_base_model().model.layers[0]
    packed_weight = first_layer.mlp.down_proj.weight
    assert packed_weight.numel() * packed_weight.element_size() == plain_layer.weight.numel() // 2
    # weights after rounding to NF4
    unpacked_weight = bitsandbytes_functional.dequantize_4bit(
        packed_weight.data, packed_weight.quant_state
    )
    assert (unpacked_weight - plain_layer.weight).abs().max() < 0.2 * plain_layer.weight.abs().max()
    row = measure_sample(LoraStep, settings, CAB_CASE | {"length": 96}, WallTimeBench())
    assert row["error"] is None and row["fits"]
    lora.make_train_state.cache_clear()
    model.clear_model_cache()


def test_out_of_memory_step_leaves_no_gradients(monkeypatch):
    def raise_out_of_memory(backward, trainable, optimizer, tokens):
        # the step has computed gradients before it fails
        for parameter in trainable:
            parameter.grad = torch.ones_like(parameter)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0")

    monkeypatch.setattr(lora, "train_step", raise_out_of_memory)
    settings = make_tiny_settings(lengths=(192,), cab=SMALL_BLOCK_ASSIGNMENTS)
    row = measure_sample(LoraStep, settings, CAB_CASE, WallTimeBench())
    assert row["fits"] is False and row["error"].startswith("out of memory")
    assert all(p.grad is None for p in lora.make_train_state(settings).trainable_parameters)
