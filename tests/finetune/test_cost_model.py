"""FLOPs against torch's counter, pairs against formulas, memory against measured tensors."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from marks import since
from tensor_bytes import TensorBytes
from tiny import SIZES, tiny_model, tokens
from tiny_types import tiny_model as tiny_type
from torch.utils.flop_counter import FlopCounterMode
from trained import batch

from cab_hf import CabConfig
from cab_hf.eval.result_folders import read_results
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import cost_model, dry_run, train
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Objective
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.settings import Settings
from cab_hf.finetune.tiles import compute_in_tiles

TARGETS = ("q_proj", "v_proj", "down_proj")
RESULTS = Path(__file__).parents[2] / "eval" / "results"


def adapted(**overrides):
    model = tiny_model(attn_implementation="eager", **overrides)
    return with_lora(model, TARGETS, rank=4, alpha=8)


def test_flops_equal_torch_flop_counter():
    length = 64
    model = adapted().train()
    # otherwise the first layer has no input gradient, and fewer operations
    model.enable_input_require_grads()
    counter = FlopCounterMode(display=False)
    with counter:
        Objective(model)(batch(length)).backward()
    cost = cost_model.Cost.of(model)
    # eager attention also computes the pairs above the diagonal
    expected = cost.products(length) + sum(cost.attention([length**2] * 3))
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_weight_flops_depend_on_trained_parameters():
    cost = cost_model.Cost.of(adapted())
    hidden, inner, heads, kv, vocabulary, layers, rank = 48, 64, 96, 32, 64, 3, 4
    frozen = 2 * hidden * heads + 2 * hidden * kv + 3 * hidden * inner
    trained = rank * (hidden + heads + hidden + kv + inner + hidden)
    assert cost.frozen == layers * frozen + vocabulary * hidden
    assert cost.trained == cost.trained_parameters == layers * trained
    # q, k, v, o, gate, up, down, an embedding, a head and norms
    rest = vocabulary * hidden + (2 * layers + 1) * hidden
    assert cost.parameters == cost.frozen + cost.trained + rest


def test_mixture_of_experts_flops_are_unknown():
    sizes = {**SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    cost = cost_model.Cost.of(model)
    assert "mlp" in cost.uncounted and cost.products(1) == 0


@since("5.24", "Gemma 4 computes one product more")
def test_attention_flops_follow_heads_of_each_layer():
    """Half of the layers of Gemma 4 have full attention, with heads twice as large."""
    length, model = 48, tiny_type("gemma4_text").float().requires_grad_(True)
    model.set_attn_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(tokens(1, length), use_cache=False)
    cost = cost_model.Cost.of(model)
    assert cost.channels == (64, 128) * 2 and cost.windows == (64, None) * 2
    expected = (cost.products(length) + sum(cost.attention([length**2] * 4))) / 3
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_pairs_respect_documents_rows_and_windows():
    cost = cost_model.Cost.of(tiny_model())
    documents = {10: [[0, 1, 2, 3]], 6: [[0, 1, 0, 1]], 17: [[0, 1, 2, 3], [0, 0, 1, 2]]}
    for pairs, positions in documents.items():
        assert cost.pairs(torch.tensor(positions)) == (pairs,) * 3
    cost = cost_model.Cost.of(tiny_model("mistral-sliding"))
    # 40 + 39 + ... + 1 pairs for the first 40 tokens, and 40 for each later token
    assert cost.pairs(torch.arange(60)[None]) == (820 + 20 * 40,) * 3
    some = cost_model.Cost.of(tiny_model("qwen3-some-sliding"))
    assert sorted(some.pairs(torch.arange(60)[None])) == [1620, 1620, 1830]
    assert some.windows == (None, 40, 40)


def test_log_line_has_density_and_pairs():
    cost = cost_model.Cost.of(tiny_model())
    layers = [{"layer": i, "density": density} for i, density in enumerate((0.5, None, 0.25))]
    totals = cost_model.count(cost, torch.arange(100)[None], layers).tolist()
    actual = cost_model.line(totals, seconds=2.0, processes=1, peak=1e9)
    (attention,) = {*cost.attention([5050] * 3)}
    assert actual["density"] == pytest.approx((0.5 + 1 + 0.25) / 3)
    products = cost.products(100)
    assert actual["mfu"] == pytest.approx((products + 1.75 * attention) / 2e9)
    assert actual["mfu_dense_equivalent"] == pytest.approx((products + 3 * attention) / 2e9)
    assert actual["tokens_per_second"] == 50


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
H200 = cost_model.Room(140 * cost_model.GIB, 128 * cost_model.GIB)


def four_layers(vocabulary, dtype=torch.float32, **options):
    sizes = {"hidden_size": 128, "intermediate_size": 448, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    model = tiny_model(num_hidden_layers=4, **sizes, **heads, **options)
    return with_lora(model.to(dtype), ATTENTION, 4, 8).train()


HELD = {
    "a layer is the peak": (64, torch.float32, True),
    "the loss is the peak": (8192, torch.float32, True),
    "layers keep all": (64, torch.float32, False),
    "bfloat16": (64, torch.bfloat16, True),
    "bfloat16, layers keep all": (64, torch.bfloat16, False),
}


@pytest.mark.parametrize(("vocabulary", "dtype", "checkpointing"), HELD.values(), ids=HELD)
def test_memory_estimate_is_close_to_measurement(vocabulary, dtype, checkpointing):
    model = four_layers(vocabulary, dtype, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    with TensorBytes(*model.parameters(), *model.buffers()) as tensor_bytes:
        Objective(model)(batch(512)).backward()
        optimizer.step()
    fields = {"itemsize": dtype.itemsize, "checkpointing": checkpointing, "loss_tokens": 2**26}
    estimate = cost_model.memory(cost_model.Cost.of(model), 512, **fields)
    assert estimate.total == pytest.approx(tensor_bytes.peak, rel=0.15)


@pytest.mark.parametrize("offloaded", [0, 3])
@pytest.mark.parametrize("vocabulary", [64, 8192], ids=["a layer is the peak", "the loss is"])
def test_memory_estimate_includes_tiles_and_offloading(vocabulary, offloaded):
    length, tile = 1024, 64
    model = four_layers(vocabulary)
    enable_gradient_checkpointing(model)
    compute_in_tiles(model, tile)
    # chunks of the size of a checkpoint
    offload = Offload(offloaded, torch.device("cpu"), length * 128 * 4)
    offload.enable(model)
    with TensorBytes(*model.parameters(), *model.buffers()) as tensor_bytes:
        Objective(model)(batch(length)).backward()
    cost = cost_model.Cost.of(model)
    estimate = cost_model.memory(
        cost, length, itemsize=4, loss_tokens=2**26, tile=tile, offloaded=offloaded
    )
    # before the first optimizer step
    actual = tensor_bytes.peak - offload.host_bytes + estimate.optimizer
    assert estimate.total == pytest.approx(actual, rel=0.05)
    # in pieces of 256 MiB
    assert estimate.host == estimate.checkpoints == offloaded * 2**28


# a layer of LLaMA-3-8B, whose checkpoint of 2^17 tokens is 1 GiB; and of SmolLM2-135M
LARGE = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    **{"head_dim": 128, "max_position_embeddings": 2**20},
}
SMALL = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152},
    **{"head_dim": 64, "max_position_embeddings": 2**17, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def large():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE)).bfloat16()
    model = with_lora(model, ATTENTION, 16, 32)
    return cost_model.Cost.of(model)


def long_step(length, **more):
    return Settings(data=("a.txt",), rank=16, length=length, **more)


@pytest.mark.parametrize(
    ("length", "gpu", "host", "offloaded"),
    [
        *((2**17, 140, 128, 0), (2**19, 140, 128, 17)),
        # 120 GiB of checkpoints and 32 of plans, and two checkpoints on the device
        (2**19, 80, 176, 30),
    ],
    ids=["room for all", "room for some", "room for two"],
)
def test_smallest_sufficient_number_of_layers_is_offloaded(large, length, gpu, host, offloaded):
    room = cost_model.Room(gpu * cost_model.GIB, host * cost_model.GIB)
    fitted = dry_run.fit(long_step(length), large, {}, room)
    assert room.holds(fitted.memory) and fitted.offloaded == offloaded
    assert fitted.memory.checkpoints == offloaded * length * 4096 * 2
    fewer = dry_run.fit(long_step(length, offload_layers=max(0, offloaded - 1)), large, {}, room)
    assert not offloaded or not room.holds(fewer.memory)


def test_offloading_is_limited_by_host_memory(large):
    room = cost_model.Room(40 * cost_model.GIB, 100 * cost_model.GIB)
    fitted = dry_run.fit(long_step(2**19, attention="cab_dense"), large, {}, room)
    assert not room.holds(fitted.memory)
    # 4 GiB each
    assert fitted.offloaded == 22 and fitted.memory.host == 88 * cost_model.GIB


def test_oversized_step_error_names_longest_length(large):
    asked = long_step(2**20)
    fitted = dry_run.fit(asked, large, {}, H200)
    with pytest.raises(UsageError, match="got 1048576; ") as told:
        dry_run.refuse_too_long(asked, large, {}, H200, fitted)
    longest = int(re.search(r"that fits is (\d+)", str(told.value))[1])
    for length, fits in ((longest, True), (longest + 1024, False)):
        assert H200.holds(dry_run.fit(long_step(length), large, {}, H200).memory) == fits


PACKED = {
    "32k": ("llama", {"length": 2**15, "micro_batch": 2}, 48.3),
    "128k": ("llama", {"length": 2**17, "tile_tokens": 0}, 93.1),
    "all weights, and masks of packed documents": (
        "qwen3",
        {"length": 2**13, "micro_batch": 4, "train": "all", "attention": "sdpa"},
        51.3,
    ),
}


@pytest.mark.parametrize(("kind", "settings", "peak_gib"), PACKED.values(), ids=PACKED)
def test_packed_step_estimate_matches_h200_measurement(kind, settings, peak_gib):
    """The model is SmolLM2-135M without checkpointing; most documents are below `min_length`."""
    config = transformers.AutoConfig.for_model(kind, **SMALL)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if "train" not in settings:
        model = with_lora(model.bfloat16(), ATTENTION, 32, 64)
    asked = Settings(data=("a.txt",), checkpointing=False, **settings)
    memory = dry_run.fit(asked, cost_model.Cost.of(model), {}, H200).memory
    assert memory.total / cost_model.GIB == pytest.approx(peak_gib, rel=0.1)


@pytest.mark.parametrize("name", ["", "-131k", "-262k", "-524k", "-4-bits-24", "-4-bits-48"])
def test_step_estimate_matches_committed_runs(large, name):
    """The steps have the shape of LLaMA-3-8B, with the recorded number of offloaded layers."""
    read = read_results(RESULTS / f"speed-lora{name}")
    four_bits = dry_run.FOUR_BIT_BYTES if read.provenance["settings"].get("qlora") else None
    rows = [row for row in read.rows if row["implementation"] == "cab" and row["fits"] is not False]
    for row in rows:
        tiled = {"tile": row["tile_tokens"], "offloaded": row["offloaded"]}
        memory = cost_model.memory(large, row["length"], quantised=four_bits, **tiled)
        assert memory.total / cost_model.GIB == pytest.approx(row["peak_gib"], rel=0.03)
    assert rows


def test_4_bit_weights_are_counted_at_stored_size(large):
    run, skeleton = (
        dry_run.fit(long_step(2**13, qlora=True, dry_run=dry), large, {}, H200).memory.weights
        for dry in (False, True)
    )
    assert run == large.weight_bytes
    # weights have 4 bits and scales instead of 16 bits, except for embeddings and head
    assert 0.3 * run < skeleton < 0.45 * run


@pytest.mark.parametrize(("gpu_gib", "offloaded"), [(1.0, None), (0.092, 2), (0.06, "refused")])
def test_gpu_offloads_number_of_layers_of_estimate(monkeypatch, gpu_gib, offloaded):
    enabled = []
    kept = SimpleNamespace(enable=enabled.append)
    monkeypatch.setattr(train, "Offload", lambda *how: enabled.append(how) or kept)
    device = torch.device("cuda")
    alone = {"distributed_type": DistributedType.NO, "num_processes": 1, "is_main_process": True}
    started = object.__new__(train.Run)
    started.accelerator = SimpleNamespace(device=device, **alone)
    fields = {"gpu_gib": gpu_gib, "host_gib": 8.0, "attention": "cab_dense", "length": 2**15}
    started.settings = Settings(data=("a.txt",), tile_tokens=16, **fields)
    started.model = with_lora(tiny_model(num_hidden_layers=8), ("q_proj",), 4, 8)
    cost = cost_model.Cost.of(started.model)
    if offloaded == "refused":
        with pytest.raises(UsageError, match="got 32768; the longest length that fits is"):
            started._fit_into_memory(cost)
        return
    started._fit_into_memory(cost)
    assert enabled == ([] if offloaded is None else [(offloaded, device), started.model])


@pytest.mark.parametrize("kind", ["gpt_neox", "bloom", "gemma4_text", "deepseek_v3"])
def test_memory_estimate_reads_all_config_spellings(kind):
    cost = cost_model.Cost.of(tiny_type(kind))
    short, long = (
        cost_model.fit(cost, n, cost_model.Room(2**30, 2**30)).memory.total for n in (100, 200)
    )
    assert 0 < short < long


def test_report_has_offload_bytes_and_time(large):
    settings = long_step(2**19, link_gbs=25.0)
    printed = dry_run.report(settings, large, 1, dry_run.fit(settings, large, {}, H200), H200)
    # 17 times 4 GiB there and back
    travel = f"copies 136.0 GiB out and back in {136 * 2**30 / 25e9:.1f} s at 25 GB/s"
    assert f"checkpoints of the first 17 layers; each micro batch {travel}" in printed
    assert "on its host: 100.00 GiB (checkpoints 68.00, plans 32.00, sharded 0.00)" in printed
    assert "fits into 140.0 GiB" in printed


def test_processes_divide_container_memory_limit(tmp_path, monkeypatch):
    file = tmp_path / "memory.max"
    monkeypatch.setattr(cost_model, "CONTAINER", file)
    complete = cost_model.host_bytes()
    file.write_text("max\n")
    assert cost_model.host_bytes() == complete
    file.write_text(f"{2**20}\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cost_model.host_bytes() == 2**18
    assert cost_model.host_bytes(given_gib=8.0) == 2 * cost_model.GIB


def test_host_weights_reduce_memory_for_checkpoints(large):
    here = cost_model.memory(large, 2**19, tile=2**13, shards=2)
    there = cost_model.memory(large, 2**19, tile=2**13, shards=2, weights_on_host=True)
    moved = (large.weight_bytes + 16 * large.trained_parameters) / 2
    assert here.total - there.total == pytest.approx(there.host) == pytest.approx(moved)
    # the device has the weights that two layers need
    assert there.weights == pytest.approx(large.weight_bytes / 16)


@pytest.mark.parametrize(
    ("config", "share"),
    # 4,096 query blocks and 8,192 key blocks in each of 32 heads, in 16 bits: by top-p, by a
    # budget, and attended exactly
    [({}, 1 / 4), ({"max_density": 0.06}, 1 / 16), ({"min_length": 2**20}, 0)],
)
def test_plan_memory_follows_longest_list(large, config, share):
    entries = 32 * 4096 * 8192 * share
    # rounded up to a power of two
    actual = cost_model.plan_bytes(large, CabConfig(**config), 2**19)
    assert actual in (32 * 2 * entries, 64 * 2 * entries)
