"""Cost model: FLOPs match `FlopCounterMode`, and memory matches the measured bytes of tensors."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from marks import skip_before
from tensor_bytes import TensorBytes
from tiny import SIZES, tiny_model, tokens
from tiny_types import tiny_model as tiny_type
from torch.utils.flop_counter import FlopCounterMode
from trained import make_batch

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


def make_adapted_model(**overrides):
    """Return the tiny model with LoRA adapters and eager attention."""
    model = tiny_model(attn_implementation="eager", **overrides)
    return with_lora(model, TARGETS, rank=4, alpha=8)


def test_flops_equal_torch_flop_counter():
    length = 64
    model = make_adapted_model().train()
    # the cost model assumes that the first layer computes the gradient of its input, too
    model.enable_input_require_grads()
    counter = FlopCounterMode(display=False)
    with counter:
        Objective(model)(make_batch(length)).backward()
    cost = cost_model.Cost.of(model)
    # eager attention computes all length^2 pairs, also those above the diagonal
    expected = cost.product_flops(length) + sum(cost.attention_flops([length**2] * 3))
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_weight_flops_depend_on_trained_parameters():
    cost = cost_model.Cost.of(make_adapted_model())
    hidden, inner, heads, kv, vocabulary, layers, rank = 48, 64, 96, 32, 64, 3, 4
    frozen = 2 * hidden * heads + 2 * hidden * kv + 3 * hidden * inner
    trained = rank * (hidden + heads + hidden + kv + inner + hidden)
    assert cost.num_frozen == layers * frozen + vocabulary * hidden
    assert cost.num_trained == cost.num_trained_parameters == layers * trained
    # parameters: linear layers (frozen), adapters (trained), input and output embeddings, norms
    embeddings_and_norms = vocabulary * hidden + (2 * layers + 1) * hidden
    assert cost.num_parameters == cost.num_frozen + cost.num_trained + embeddings_and_norms


def test_mixture_of_experts_flops_are_unknown():
    sizes = {**SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    cost = cost_model.Cost.of(model)
    assert "mlp" in cost.uncounted_reason and cost.product_flops(1) == 0


@skip_before("5.24", "Gemma 4 computes one product more")
def test_attention_flops_follow_heads_of_each_layer():
    """Half of Gemma 4's layers have full attention, with twice the head dim of windowed layers."""
    length, model = 48, tiny_type("gemma4_text").float().requires_grad_(True)
    model.set_attn_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(tokens(1, length), use_cache=False)
    cost = cost_model.Cost.of(model)
    assert cost.channels == (64, 128) * 2 and cost.windows == (64, None) * 2
    expected = (cost.product_flops(length) + sum(cost.attention_flops([length**2] * 4))) / 3
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_pairs_respect_documents_rows_and_windows():
    cost = cost_model.Cost.of(tiny_model())
    positions_by_pairs = {10: [[0, 1, 2, 3]], 6: [[0, 1, 0, 1]], 17: [[0, 1, 2, 3], [0, 0, 1, 2]]}
    for pairs, positions in positions_by_pairs.items():
        assert cost.count_pairs(torch.tensor(positions)) == (pairs,) * 3
    cost = cost_model.Cost.of(tiny_model("mistral-sliding"))
    # 40 + 39 + ... + 1 pairs for the first 40 tokens, and 40 for each later token
    assert cost.count_pairs(torch.arange(60)[None]) == (820 + 20 * 40,) * 3
    mixed = cost_model.Cost.of(tiny_model("qwen3-some-sliding"))
    assert sorted(mixed.count_pairs(torch.arange(60)[None])) == [1620, 1620, 1830]
    assert mixed.windows == (None, 40, 40)


def test_log_line_has_density_and_pairs():
    cost = cost_model.Cost.of(tiny_model())
    layers = [{"layer": i, "density": density} for i, density in enumerate((0.5, None, 0.25))]
    totals = cost_model.count_flops(cost, torch.arange(100)[None], layers).tolist()
    actual = cost_model.make_step_fields(
        totals, seconds=2.0, num_processes=1, peak_flops_per_device=1e9
    )
    (attention,) = {*cost.attention_flops([5050] * 3)}
    assert actual["density"] == pytest.approx((0.5 + 1 + 0.25) / 3)
    products = cost.product_flops(100)
    assert actual["mfu"] == pytest.approx((products + 1.75 * attention) / 2e9)
    assert actual["mfu_dense_equivalent"] == pytest.approx((products + 3 * attention) / 2e9)
    assert actual["tokens_per_second"] == 50


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
H200 = cost_model.AvailableMemory(140 * cost_model.GIB, 128 * cost_model.GIB)


def make_four_layer_model(vocabulary, dtype=torch.float32, **options):
    """Return a four-layer model with LoRA adapters on attention projections, in training mode."""
    sizes = {"hidden_size": 128, "intermediate_size": 448, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    model = tiny_model(num_hidden_layers=4, **sizes, **heads, **options)
    return with_lora(model.to(dtype), ATTENTION, 4, 8).train()


# by name: (vocabulary, dtype, True for gradient checkpointing)
STEPS = {
    "peak in a layer": (64, torch.float32, True),
    "peak in the loss": (8192, torch.float32, True),
    "no checkpointing": (64, torch.float32, False),
    "bfloat16": (64, torch.bfloat16, True),
    "bfloat16, no checkpointing": (64, torch.bfloat16, False),
}


@pytest.mark.parametrize(("vocabulary", "dtype", "checkpointing"), STEPS.values(), ids=STEPS)
def test_memory_estimate_is_close_to_measurement(vocabulary, dtype, checkpointing):
    model = make_four_layer_model(vocabulary, dtype, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    with TensorBytes(*model.parameters(), *model.buffers()) as tensor_bytes:
        Objective(model)(make_batch(512)).backward()
        optimizer.step()
    fields = {"itemsize": dtype.itemsize, "checkpointing": checkpointing, "loss_tokens": 2**26}
    estimate = cost_model.estimate_memory(cost_model.Cost.of(model), 512, **fields)
    assert estimate.total == pytest.approx(tensor_bytes.peak, rel=0.15)


@pytest.mark.parametrize("offloaded", [0, 3])
@pytest.mark.parametrize("vocabulary", [64, 8192], ids=["peak in a layer", "peak in the loss"])
def test_memory_estimate_includes_tiles_and_offloading(vocabulary, offloaded):
    length, tile = 1024, 64
    model = make_four_layer_model(vocabulary)
    enable_gradient_checkpointing(model)
    compute_in_tiles(model, tile)
    checkpoint_bytes = length * 128 * 4
    offload = Offload(offloaded, torch.device("cpu"), chunk_bytes=checkpoint_bytes)
    offload.enable(model)
    with TensorBytes(*model.parameters(), *model.buffers()) as tensor_bytes:
        Objective(model)(make_batch(length)).backward()
    cost = cost_model.Cost.of(model)
    estimate = cost_model.estimate_memory(
        cost, length, itemsize=4, loss_tokens=2**26, tile_tokens=tile, num_offloaded=offloaded
    )
    # on a CPU, offloaded checkpoints are counted too: subtract them. The measured step has no
    # optimizer: add its estimate
    actual = tensor_bytes.peak - offload.host_bytes + estimate.optimizer
    assert estimate.total == pytest.approx(actual, rel=0.05)
    # each offloaded checkpoint takes one chunk of host memory, 256 MiB
    assert estimate.host == estimate.checkpoints == offloaded * 2**28


# config of LLaMA-3-8B. The checkpoint of one layer takes 1 GiB for 2^17 tokens in bfloat16
LARGE = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    **{"head_dim": 128, "max_position_embeddings": 2**20},
}
# config of SmolLM2-135M
SMALL = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152},
    **{"head_dim": 64, "max_position_embeddings": 2**17, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def large():
    """Return the cost of LLaMA-3-8B with LoRA adapters on attention."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE)).bfloat16()
    model = with_lora(model, ATTENTION, 16, 32)
    return cost_model.Cost.of(model)


def make_settings(length, **options):
    """Return settings of a run with sequences of ``length`` tokens."""
    return Settings(data=("a.txt",), rank=16, length=length, **options)


@pytest.mark.parametrize(
    ("length", "gpu", "host", "offloaded"),
    [
        *((2**17, 140, 128, 0), (2**19, 140, 128, 17)),
        # on the host: 30 checkpoints of 4 GiB, and 32 GiB of plans; on the device: two checkpoints
        (2**19, 80, 176, 30),
    ],
    ids=["all layers fit", "some layers fit", "two layers fit"],
)
def test_smallest_sufficient_number_of_layers_is_offloaded(large, length, gpu, host, offloaded):
    room = cost_model.AvailableMemory(gpu * cost_model.GIB, host * cost_model.GIB)
    fitted = dry_run.choose_offloading(make_settings(length), large, {}, room)
    assert room.can_hold(fitted.memory) and fitted.num_offloaded == offloaded
    assert fitted.memory.checkpoints == offloaded * length * 4096 * 2
    fewer = dry_run.choose_offloading(
        make_settings(length, offload_layers=max(0, offloaded - 1)), large, {}, room
    )
    assert not offloaded or not room.can_hold(fewer.memory)


def test_offloading_is_limited_by_host_memory(large):
    room = cost_model.AvailableMemory(40 * cost_model.GIB, 100 * cost_model.GIB)
    fitted = dry_run.choose_offloading(make_settings(2**19, attention="cab_dense"), large, {}, room)
    assert not room.can_hold(fitted.memory)
    # 22 checkpoints of 4 GiB each are on the host
    assert fitted.num_offloaded == 22 and fitted.memory.host == 88 * cost_model.GIB


def test_oversized_step_error_names_longest_length(large):
    settings = make_settings(2**20)
    fitted = dry_run.choose_offloading(settings, large, {}, H200)
    with pytest.raises(UsageError, match="got 1048576; ") as raised:
        dry_run.refuse_too_long(settings, large, {}, H200, memory_fit=fitted)
    longest = int(re.search(r"that fits is (\d+)", str(raised.value))[1])
    for length, fits in ((longest, True), (longest + 1024, False)):
        assert (
            H200.can_hold(dry_run.choose_offloading(make_settings(length), large, {}, H200).memory)
            == fits
        )


# by name: (model type, settings, peak GiB that was measured on an H200)
PACKED = {
    "32k": ("llama", {"length": 2**15, "micro_batch": 2}, 48.3),
    "128k": ("llama", {"length": 2**17, "tile_tokens": 0}, 93.1),
    "all weights, and masks of packed documents": (
        "qwen3",
        {"length": 2**13, "micro_batch": 4, "train": "all", "attention": "sdpa"},
        51.3,
    ),
}


@pytest.mark.parametrize(("model_type", "settings", "peak_gib"), PACKED.values(), ids=PACKED)
def test_packed_step_estimate_matches_h200_measurement(model_type, settings, peak_gib):
    """Estimate SmolLM2-135M without checkpointing; most documents are shorter than `min_length`."""
    config = transformers.AutoConfig.for_model(model_type, **SMALL)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if "train" not in settings:
        model = with_lora(model.bfloat16(), ATTENTION, 32, 64)
    run_settings = Settings(data=("a.txt",), checkpointing=False, **settings)
    memory = dry_run.choose_offloading(run_settings, cost_model.Cost.of(model), {}, H200).memory
    assert memory.total / cost_model.GIB == pytest.approx(peak_gib, rel=0.1)


@pytest.mark.parametrize("name", ["", "-131k", "-262k", "-524k", "-4-bits-24", "-4-bits-48"])
def test_step_estimate_matches_committed_runs(large, name):
    """Estimate steps of LLaMA-3-8B, with the number of offloaded layers that the runs recorded."""
    results = read_results(RESULTS / f"speed-lora{name}")
    four_bits = dry_run.FOUR_BIT_BYTES if results.provenance["settings"].get("qlora") else None
    rows = [
        row for row in results.rows if row["implementation"] == "cab" and row["fits"] is not False
    ]
    for row in rows:
        memory = cost_model.estimate_memory(
            large,
            row["length"],
            quantised_bytes=four_bits,
            tile_tokens=row["tile_tokens"],
            num_offloaded=row["offloaded"],
        )
        assert memory.total / cost_model.GIB == pytest.approx(row["peak_gib"], rel=0.03)
    assert rows


def test_4_bit_weights_are_counted_at_stored_size(large):
    loaded, estimated = (
        dry_run.choose_offloading(
            make_settings(2**13, qlora=True, dry_run=dry), large, {}, H200
        ).memory.weights
        for dry in (False, True)
    )
    assert loaded == large.weight_bytes
    # weights take 4 bits and their scales instead of 16 bits; embeddings and head stay at 16 bits
    assert 0.3 * loaded < estimated < 0.45 * loaded


@pytest.mark.parametrize(("gpu_gib", "offloaded"), [(1.0, None), (0.092, 2), (0.06, "refused")])
def test_gpu_offloads_number_of_layers_of_estimate(monkeypatch, gpu_gib, offloaded):
    enabled = []
    offload = SimpleNamespace(enable=enabled.append)
    monkeypatch.setattr(train, "Offload", lambda *args: enabled.append(args) or offload)
    device = torch.device("cuda")
    run = object.__new__(train.Run)
    run.accelerator = SimpleNamespace(
        device=device,
        distributed_type=DistributedType.NO,
        num_processes=1,
        is_main_process=True,
    )
    fields = {"gpu_gib": gpu_gib, "host_gib": 8.0, "attention": "cab_dense", "length": 2**15}
    run.settings = Settings(data=("a.txt",), tile_tokens=16, **fields)
    run.model = with_lora(tiny_model(num_hidden_layers=8), ("q_proj",), 4, 8)
    cost = cost_model.Cost.of(run.model)
    if offloaded == "refused":
        with pytest.raises(UsageError, match="got 32768; the longest length that fits is"):
            run._fit_into_memory(cost)
        return
    run._fit_into_memory(cost)
    assert enabled == ([] if offloaded is None else [(offloaded, device), run.model])


@pytest.mark.parametrize("kind", ["gpt_neox", "bloom", "gemma4_text", "deepseek_v3"])
def test_memory_estimate_reads_all_config_spellings(kind):
    cost = cost_model.Cost.of(tiny_type(kind))
    short, long = (
        cost_model.choose_offloading(cost, n, cost_model.AvailableMemory(2**30, 2**30)).memory.total
        for n in (100, 200)
    )
    assert 0 < short < long


def test_report_has_offload_bytes_and_time(large):
    settings = make_settings(2**19, link_gbs=25.0)
    fitted = dry_run.choose_offloading(settings, large, {}, H200)
    printed = dry_run.format_report(
        settings, large, num_processes=1, memory_fit=fitted, available_memory=H200
    )
    # 17 layers x 4 GiB, copied to the host and back
    copies = f"copies 136.0 GiB out and back in {136 * 2**30 / 25e9:.1f} s at 25 GB/s"
    assert f"checkpoints of the first 17 layers; each micro batch {copies}" in printed
    assert "on its host: 100.00 GiB (checkpoints 68.00, plans 32.00, sharded 0.00)" in printed
    assert "fits into 140.0 GiB" in printed


def test_processes_divide_container_memory_limit(tmp_path, monkeypatch):
    file = tmp_path / "memory.max"
    monkeypatch.setattr(cost_model, "CONTAINER_LIMIT_FILE", file)
    without_limit = cost_model.get_host_bytes()
    file.write_text("max\n")
    assert cost_model.get_host_bytes() == without_limit
    file.write_text(f"{2**20}\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cost_model.get_host_bytes() == 2**18
    assert cost_model.get_host_bytes(requested_gib=8.0) == 2 * cost_model.GIB


def test_host_weights_reduce_memory_for_checkpoints(large):
    on_gpu = cost_model.estimate_memory(large, 2**19, tile_tokens=2**13, num_shards=2)
    on_host = cost_model.estimate_memory(
        large, 2**19, tile_tokens=2**13, num_shards=2, weights_on_host=True
    )
    moved_bytes = (large.weight_bytes + 16 * large.num_trained_parameters) / 2
    difference = on_gpu.total - on_host.total
    assert difference == pytest.approx(on_host.host) == pytest.approx(moved_bytes)
    # the device never has the weights of more than 2 of the 32 layers at once
    assert on_host.weights == pytest.approx(large.weight_bytes / 16)


@pytest.mark.parametrize(
    ("config", "share"),
    # share = length of the longest block list / 8,192 key blocks: 1/4 is assumed for a threshold,
    # 1/16 is max_density rounded up, and dense attention has no lists
    [({}, 1 / 4), ({"max_density": 0.06}, 1 / 16), ({"min_length": 2**20}, 0)],
)
def test_plan_memory_follows_longest_list(large, config, share):
    heads, query_blocks, key_blocks, layers, entry_bytes = 32, 4096, 8192, 32, 2
    plan = heads * query_blocks * key_blocks * share * entry_bytes
    # the bytes of a plan are rounded up to a power of two
    actual = cost_model.estimate_plan_bytes(large, CabConfig(**config), 2**19)
    assert actual in (layers * plan, 2 * layers * plan)
