"""Cost model: FLOPs match `FlopCounterMode`, and memory matches the measured bytes of tensors."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.utils import DistributedType
from marks import skip_before_transformers
from tensor_bytes import TensorBytes
from tiny import MODEL_SIZES, draw_token_ids, make_tiny_model
from tiny_types import make_tiny_model as make_model_of_type
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

LORA_TARGETS = ("q_proj", "v_proj", "down_proj")
RESULTS_FOLDER = Path(__file__).parents[2] / "eval" / "results"


def make_adapted_model(**config_overrides):
    """Return the tiny model with LoRA adapters and eager attention."""
    model = make_tiny_model(attn_implementation="eager", **config_overrides)
    return with_lora(model, LORA_TARGETS, rank=4, alpha=8)


def test_flops_equal_torch_flop_counter():
    length = 64
    model = make_adapted_model().train()
    # the cost model assumes that the first layer computes the gradient of its input, too
    model.enable_input_require_grads()
    flop_counter = FlopCounterMode(display=False)
    with flop_counter:
        Objective(model)(make_batch(length)).backward()
    cost = cost_model.Cost.from_model(model)
    # eager attention computes all length^2 pairs, also those above the diagonal
    expected_flops = cost.count_product_flops(length) + sum(
        cost.count_attention_flops([length**2] * 3)
    )
    assert flop_counter.get_total_flops() == pytest.approx(expected_flops, rel=0.01)


def test_weight_flops_depend_on_trained_parameters():
    cost = cost_model.Cost.from_model(make_adapted_model())
    (
        hidden_size,
        intermediate_size,
        query_channels,
        kv_channels,
        vocabulary_size,
        num_layers,
        rank,
    ) = 48, 64, 96, 32, 64, 3, 4
    frozen_weights_per_layer = (
        2 * hidden_size * query_channels
        + 2 * hidden_size * kv_channels
        + 3 * hidden_size * intermediate_size
    )
    trained_weights_per_layer = rank * (
        hidden_size + query_channels + hidden_size + kv_channels + intermediate_size + hidden_size
    )
    assert (
        cost.num_frozen_weights
        == num_layers * frozen_weights_per_layer + vocabulary_size * hidden_size
    )
    assert (
        cost.num_trained_weights
        == cost.num_trained_parameters
        == num_layers * trained_weights_per_layer
    )
    # parameters: linear layers (frozen), adapters (trained), input and output embeddings, norms
    num_embedding_and_norm_weights = (
        vocabulary_size * hidden_size + (2 * num_layers + 1) * hidden_size
    )
    assert (
        cost.num_parameters
        == cost.num_frozen_weights + cost.num_trained_weights + num_embedding_and_norm_weights
    )


def test_mixture_of_experts_flops_are_unknown():
    config_sizes = {
        **MODEL_SIZES,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config_sizes))
    cost = cost_model.Cost.from_model(model)
    assert "mlp" in cost.unknown_flops_reason and cost.count_product_flops(1) == 0


@skip_before_transformers("5.24", "Gemma 4 computes one product more")
def test_attention_flops_follow_heads_of_each_layer():
    """Half of Gemma 4's layers have full attention, with twice the head dim of windowed layers."""
    length, model = 48, make_model_of_type("gemma4_text").float().requires_grad_(True)
    model.set_attn_implementation("eager")
    flop_counter = FlopCounterMode(display=False)
    with flop_counter, torch.no_grad():
        model(draw_token_ids(1, length), use_cache=False)
    cost = cost_model.Cost.from_model(model)
    assert cost.layer_channels == (64, 128) * 2 and cost.layer_windows == (64, None) * 2
    expected_flops = (
        cost.count_product_flops(length) + sum(cost.count_attention_flops([length**2] * 4))
    ) / 3
    assert flop_counter.get_total_flops() == pytest.approx(expected_flops, rel=1e-9)


def test_pairs_respect_documents_rows_and_windows():
    cost = cost_model.Cost.from_model(make_tiny_model())
    positions_by_num_pairs = {
        10: [[0, 1, 2, 3]],
        6: [[0, 1, 0, 1]],
        17: [[0, 1, 2, 3], [0, 0, 1, 2]],
    }
    for num_pairs, positions in positions_by_num_pairs.items():
        assert cost.count_pairs(torch.tensor(positions)) == (num_pairs,) * 3
    cost = cost_model.Cost.from_model(make_tiny_model("mistral-sliding"))
    # 40 + 39 + ... + 1 pairs for the first 40 tokens, and 40 for each later token
    assert cost.count_pairs(torch.arange(60)[None]) == (820 + 20 * 40,) * 3
    mixed_window_cost = cost_model.Cost.from_model(make_tiny_model("qwen3-some-sliding"))
    assert sorted(mixed_window_cost.count_pairs(torch.arange(60)[None])) == [1620, 1620, 1830]
    assert mixed_window_cost.layer_windows == (None, 40, 40)


def test_log_line_has_density_and_pairs():
    cost = cost_model.Cost.from_model(make_tiny_model())
    layer_stats = [
        {"layer": layer_index, "density": density}
        for layer_index, density in enumerate((0.5, None, 0.25))
    ]
    token_and_flop_totals = cost_model.count_flops(
        cost, torch.arange(100)[None], layer_stats
    ).tolist()
    log_fields = cost_model.make_step_log_fields(
        token_and_flop_totals, step_seconds=2.0, num_processes=1, peak_flops_per_device=1e9
    )
    (attention_flops,) = {*cost.count_attention_flops([5050] * 3)}
    assert log_fields["density"] == pytest.approx((0.5 + 1 + 0.25) / 3)
    product_flops = cost.count_product_flops(100)
    assert log_fields["mfu"] == pytest.approx((product_flops + 1.75 * attention_flops) / 2e9)
    assert log_fields["mfu_dense_equivalent"] == pytest.approx(
        (product_flops + 3 * attention_flops) / 2e9
    )
    assert log_fields["tokens_per_second"] == 50


ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
H200_MEMORY = cost_model.AvailableMemory(140 * cost_model.GIB, 128 * cost_model.GIB)


def make_four_layer_model(vocabulary_size, dtype=torch.float32, **model_options):
    """Return a four-layer model with LoRA adapters on attention projections, in training mode."""
    config_sizes = {"hidden_size": 128, "intermediate_size": 448, "vocab_size": vocabulary_size}
    head_sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    model = make_tiny_model(num_hidden_layers=4, **config_sizes, **head_sizes, **model_options)
    return with_lora(model.to(dtype), ATTENTION_PROJECTIONS, 4, 8).train()


# by name: (vocabulary, dtype, True for gradient checkpointing)
STEP_CASES = {
    "peak in a layer": (64, torch.float32, True),
    "peak in the loss": (8192, torch.float32, True),
    "no checkpointing": (64, torch.float32, False),
    "bfloat16": (64, torch.bfloat16, True),
    "bfloat16, no checkpointing": (64, torch.bfloat16, False),
}


@pytest.mark.parametrize(
    ("vocabulary_size", "dtype", "has_checkpointing"), STEP_CASES.values(), ids=STEP_CASES
)
def test_memory_estimate_is_close_to_measurement(vocabulary_size, dtype, has_checkpointing):
    model = make_four_layer_model(vocabulary_size, dtype, attn_implementation="sdpa")
    if has_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    with TensorBytes(*model.parameters(), *model.buffers()) as tensor_bytes:
        Objective(model)(make_batch(512)).backward()
        optimizer.step()
    estimate_options = {
        "itemsize": dtype.itemsize,
        "has_checkpointing": has_checkpointing,
        "loss_chunk_tokens": 2**26,
    }
    estimated_memory = cost_model.estimate_memory(
        cost_model.Cost.from_model(model), 512, **estimate_options
    )
    assert estimated_memory.device_bytes == pytest.approx(tensor_bytes.peak_bytes, rel=0.15)


@pytest.mark.parametrize("num_offloaded_layers", [0, 3])
@pytest.mark.parametrize("vocabulary_size", [64, 8192], ids=["peak in a layer", "peak in the loss"])
def test_memory_estimate_includes_tiles_and_offloading(vocabulary_size, num_offloaded_layers):
    length, tile_tokens = 1024, 64
    model = make_four_layer_model(vocabulary_size)
    enable_gradient_checkpointing(model)
    compute_in_tiles(model, tile_tokens)
    checkpoint_bytes = length * 128 * 4
    offload = Offload(num_offloaded_layers, torch.device("cpu"), chunk_bytes=checkpoint_bytes)
    offload.install_in_layers(model)
    with TensorBytes(*model.parameters(), *model.buffers()) as tensor_bytes:
        Objective(model)(make_batch(length)).backward()
    cost = cost_model.Cost.from_model(model)
    estimated_memory = cost_model.estimate_memory(
        cost,
        length,
        itemsize=4,
        loss_chunk_tokens=2**26,
        tile_tokens=tile_tokens,
        num_offloaded_layers=num_offloaded_layers,
    )
    # on a CPU, offloaded checkpoints are counted too: subtract them. The measured step has no
    # optimizer: add its estimate
    measured_bytes = tensor_bytes.peak_bytes - offload.host_bytes + estimated_memory.optimizer_bytes
    assert estimated_memory.device_bytes == pytest.approx(measured_bytes, rel=0.05)
    # each offloaded checkpoint takes one chunk of host memory, 256 MiB
    assert (
        estimated_memory.host_bytes
        == estimated_memory.offloaded_checkpoint_bytes
        == num_offloaded_layers * 2**28
    )


# config of LLaMA-3-8B. The checkpoint of one layer takes 1 GiB for 2^17 tokens in bfloat16
LLAMA_8B_SIZES = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    **{"head_dim": 128, "max_position_embeddings": 2**20},
}
# config of SmolLM2-135M
SMOLLM2_SIZES = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152},
    **{"head_dim": 64, "max_position_embeddings": 2**17, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def llama_8b_cost():
    """Return the cost of LLaMA-3-8B with LoRA adapters on attention."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_8B_SIZES)).bfloat16()
    model = with_lora(model, ATTENTION_PROJECTIONS, 16, 32)
    return cost_model.Cost.from_model(model)


def make_settings(length, **other_settings):
    """Return settings of a run with sequences of ``length`` tokens."""
    return Settings(data=("a.txt",), rank=16, length=length, **other_settings)


@pytest.mark.parametrize(
    ("length", "gpu_gib", "host_gib", "num_offloaded_layers"),
    [
        *((2**17, 140, 128, 0), (2**19, 140, 128, 17)),
        # on the host: 30 checkpoints of 4 GiB, and 32 GiB of plans; on the device: two checkpoints
        (2**19, 80, 176, 30),
    ],
    ids=["all layers fit", "some layers fit", "two layers fit"],
)
def test_smallest_sufficient_number_of_layers_is_offloaded(
    llama_8b_cost, length, gpu_gib, host_gib, num_offloaded_layers
):
    available_memory = cost_model.AvailableMemory(
        gpu_gib * cost_model.GIB, host_gib * cost_model.GIB
    )
    memory_fit = dry_run.choose_offloading(
        make_settings(length), llama_8b_cost, {}, available_memory
    )
    assert (
        available_memory.can_hold(memory_fit.memory)
        and memory_fit.num_offloaded_layers == num_offloaded_layers
    )
    assert memory_fit.memory.offloaded_checkpoint_bytes == num_offloaded_layers * length * 4096 * 2
    fit_with_fewer_layers = dry_run.choose_offloading(
        make_settings(length, offload_layers=max(0, num_offloaded_layers - 1)),
        llama_8b_cost,
        {},
        available_memory,
    )
    assert not num_offloaded_layers or not available_memory.can_hold(fit_with_fewer_layers.memory)


def test_offloading_is_limited_by_host_memory(llama_8b_cost):
    available_memory = cost_model.AvailableMemory(40 * cost_model.GIB, 100 * cost_model.GIB)
    memory_fit = dry_run.choose_offloading(
        make_settings(2**19, attention="cab_dense"), llama_8b_cost, {}, available_memory
    )
    assert not available_memory.can_hold(memory_fit.memory)
    # 22 checkpoints of 4 GiB each are on the host
    assert (
        memory_fit.num_offloaded_layers == 22
        and memory_fit.memory.host_bytes == 88 * cost_model.GIB
    )


def test_oversized_step_error_names_longest_length(llama_8b_cost):
    settings = make_settings(2**20)
    memory_fit = dry_run.choose_offloading(settings, llama_8b_cost, {}, H200_MEMORY)
    with pytest.raises(UsageError, match="got 1048576; ") as error_info:
        dry_run.refuse_too_long_sequences(
            settings, llama_8b_cost, {}, H200_MEMORY, memory_fit=memory_fit
        )
    longest_length = int(re.search(r"that fits is (\d+)", str(error_info.value))[1])
    for length, is_fitting in ((longest_length, True), (longest_length + 1024, False)):
        assert (
            H200_MEMORY.can_hold(
                dry_run.choose_offloading(
                    make_settings(length), llama_8b_cost, {}, H200_MEMORY
                ).memory
            )
            == is_fitting
        )


# by name: (model type, settings, peak GiB that was measured on an H200)
H200_MEASUREMENTS = {
    "32k": ("llama", {"length": 2**15, "micro_batch": 2}, 48.3),
    "128k": ("llama", {"length": 2**17, "tile_tokens": 0}, 93.1),
    "all weights, and masks of packed documents": (
        "qwen3",
        {"length": 2**13, "micro_batch": 4, "train": "all", "attention": "sdpa"},
        51.3,
    ),
}


@pytest.mark.parametrize(
    ("model_type", "other_settings", "peak_gib"), H200_MEASUREMENTS.values(), ids=H200_MEASUREMENTS
)
def test_packed_step_estimate_matches_h200_measurement(model_type, other_settings, peak_gib):
    """Estimate SmolLM2-135M without checkpointing; most documents are shorter than `min_length`."""
    config = transformers.AutoConfig.for_model(model_type, **SMOLLM2_SIZES)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if "train" not in other_settings:
        model = with_lora(model.bfloat16(), ATTENTION_PROJECTIONS, 32, 64)
    run_settings = Settings(data=("a.txt",), checkpointing=False, **other_settings)
    step_memory = dry_run.choose_offloading(
        run_settings, cost_model.Cost.from_model(model), {}, H200_MEMORY
    ).memory
    assert step_memory.device_bytes / cost_model.GIB == pytest.approx(peak_gib, rel=0.1)


@pytest.mark.parametrize(
    "folder_suffix", ["", "-131k", "-262k", "-524k", "-4-bits-24", "-4-bits-48"]
)
def test_step_estimate_matches_committed_runs(llama_8b_cost, folder_suffix):
    """Estimate steps of LLaMA-3-8B, with the number of offloaded layers that the runs recorded."""
    results = read_results(RESULTS_FOLDER / f"speed-lora{folder_suffix}")
    bytes_per_4_bit_weight = (
        dry_run.BYTES_PER_4_BIT_WEIGHT if results.provenance["settings"].get("qlora") else None
    )
    rows = [
        row for row in results.rows if row["implementation"] == "cab" and row["fits"] is not False
    ]
    for row in rows:
        step_memory = cost_model.estimate_memory(
            llama_8b_cost,
            row["length"],
            bytes_per_quantised_weight=bytes_per_4_bit_weight,
            tile_tokens=row["tile_tokens"],
            num_offloaded_layers=row["offloaded"],
        )
        assert step_memory.device_bytes / cost_model.GIB == pytest.approx(row["peak_gib"], rel=0.03)
    assert rows


def test_4_bit_weights_are_counted_at_stored_size(llama_8b_cost):
    loaded_weight_bytes, estimated_weight_bytes = (
        dry_run.choose_offloading(
            make_settings(2**13, qlora=True, dry_run=is_dry_run), llama_8b_cost, {}, H200_MEMORY
        ).memory.weight_bytes
        for is_dry_run in (False, True)
    )
    assert loaded_weight_bytes == llama_8b_cost.weight_bytes
    # weights take 4 bits and their scales instead of 16 bits; embeddings and head stay at 16 bits
    assert 0.3 * loaded_weight_bytes < estimated_weight_bytes < 0.45 * loaded_weight_bytes


@pytest.mark.parametrize(
    ("gpu_gib", "num_offloaded_layers"), [(1.0, None), (0.092, 2), (0.06, "refused")]
)
def test_gpu_offloads_number_of_layers_of_estimate(monkeypatch, gpu_gib, num_offloaded_layers):
    offload_calls = []
    offload = SimpleNamespace(install_in_layers=offload_calls.append)
    monkeypatch.setattr(train, "Offload", lambda *args: offload_calls.append(args) or offload)
    device = torch.device("cuda")
    run = object.__new__(train.Run)
    run.accelerator = SimpleNamespace(
        device=device,
        distributed_type=DistributedType.NO,
        num_processes=1,
        is_main_process=True,
    )
    memory_settings = {
        "gpu_gib": gpu_gib,
        "host_gib": 8.0,
        "attention": "cab_dense",
        "length": 2**15,
    }
    run.settings = Settings(data=("a.txt",), tile_tokens=16, **memory_settings)
    run.model = with_lora(make_tiny_model(num_hidden_layers=8), ("q_proj",), 4, 8)
    cost = cost_model.Cost.from_model(run.model)
    if num_offloaded_layers == "refused":
        with pytest.raises(UsageError, match="got 32768; the longest length that fits is"):
            run._fit_into_memory(cost)
        return
    run._fit_into_memory(cost)
    assert offload_calls == (
        [] if num_offloaded_layers is None else [(num_offloaded_layers, device), run.model]
    )


@pytest.mark.parametrize("model_type", ["gpt_neox", "bloom", "gemma4_text", "deepseek_v3"])
def test_memory_estimate_reads_all_config_spellings(model_type):
    cost = cost_model.Cost.from_model(make_model_of_type(model_type))
    short_step_bytes, long_step_bytes = (
        cost_model.choose_offloading(
            cost, num_tokens, cost_model.AvailableMemory(2**30, 2**30)
        ).memory.device_bytes
        for num_tokens in (100, 200)
    )
    assert 0 < short_step_bytes < long_step_bytes


def test_report_has_offload_bytes_and_time(llama_8b_cost):
    settings = make_settings(2**19, link_gbs=25.0)
    memory_fit = dry_run.choose_offloading(settings, llama_8b_cost, {}, H200_MEMORY)
    report_text = dry_run.format_report(
        settings,
        llama_8b_cost,
        num_processes=1,
        memory_fit=memory_fit,
        available_memory=H200_MEMORY,
    )
    # 17 layers x 4 GiB, copied to the host and back
    copy_description = f"copies 136.0 GiB out and back in {136 * 2**30 / 25e9:.1f} s at 25 GB/s"
    assert f"checkpoints of the first 17 layers; each micro batch {copy_description}" in report_text
    assert "on its host: 100.00 GiB (checkpoints 68.00, plans 32.00, sharded 0.00)" in report_text
    assert "fits into 140.0 GiB" in report_text


def test_processes_divide_container_memory_limit(tmp_path, monkeypatch):
    limit_file = tmp_path / "memory.max"
    monkeypatch.setattr(cost_model, "CONTAINER_LIMIT_FILE", limit_file)
    host_bytes_without_limit = cost_model.get_host_bytes()
    limit_file.write_text("max\n")
    assert cost_model.get_host_bytes() == host_bytes_without_limit
    limit_file.write_text(f"{2**20}\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cost_model.get_host_bytes() == 2**18
    assert cost_model.get_host_bytes(requested_gib=8.0) == 2 * cost_model.GIB


def test_host_weights_reduce_memory_for_checkpoints(llama_8b_cost):
    memory_with_gpu_weights = cost_model.estimate_memory(
        llama_8b_cost, 2**19, tile_tokens=2**13, num_shards=2
    )
    memory_with_host_weights = cost_model.estimate_memory(
        llama_8b_cost, 2**19, tile_tokens=2**13, num_shards=2, are_weights_on_host=True
    )
    moved_bytes = (llama_8b_cost.weight_bytes + 16 * llama_8b_cost.num_trained_parameters) / 2
    saved_device_bytes = (
        memory_with_gpu_weights.device_bytes - memory_with_host_weights.device_bytes
    )
    assert (
        saved_device_bytes
        == pytest.approx(memory_with_host_weights.host_bytes)
        == pytest.approx(moved_bytes)
    )
    # the device never has the weights of more than 2 of the 32 layers at once
    assert memory_with_host_weights.weight_bytes == pytest.approx(llama_8b_cost.weight_bytes / 16)


@pytest.mark.parametrize(
    ("config_fields", "longest_list_share"),
    # share = length of the longest block list / 8,192 key blocks: 1/4 is assumed for a threshold,
    # 1/16 is max_density rounded up, and dense attention has no lists
    [({}, 1 / 4), ({"max_density": 0.06}, 1 / 16), ({"min_length": 2**20}, 0)],
)
def test_plan_memory_follows_longest_list(llama_8b_cost, config_fields, longest_list_share):
    num_heads, num_query_blocks, num_key_blocks, num_layers, entry_bytes = 32, 4096, 8192, 32, 2
    plan_bytes = num_heads * num_query_blocks * num_key_blocks * longest_list_share * entry_bytes
    # the bytes of a plan are rounded up to a power of two
    estimated_bytes = cost_model.estimate_plan_bytes(
        llama_8b_cost, CabConfig(**config_fields), 2**19
    )
    assert estimated_bytes in (num_layers * plan_bytes, 2 * num_layers * plan_bytes)
