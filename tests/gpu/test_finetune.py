"""Training on CUDA devices: on one GPU, and on two GPUs where a host has two."""

import json

import pytest
import torch
from launches import TRAIN_COMMAND, read_step_field, run_process
from tiny import SPARSE_CONFIG, draw_token_ids, make_tiny_model
from trained import interrupt_backward

import cab_hf
from cab_hf.experiment.log import read_log
from cab_hf.finetune import train
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Objective
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.tiles import compute_in_tiles

pytestmark = pytest.mark.gpu
BFLOAT16_COMMAND = [*TRAIN_COMMAND, "--dtype", "bfloat16"]
TORCHRUN_COMMAND = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(autouse=True)
def _turn_off_multicast(monkeypatch):
    """Turn off NVLink multicast, which shared machines do not allow."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")


def run_command(command):
    """Run a command line, a sequence of words, and assert that it succeeds."""
    process = run_process(command)
    assert process.returncode == 0, process.stderr[-2000:]


def test_offloaded_plan_gives_equal_gradients(gpu):
    ids = draw_token_ids(1, 600).to(gpu)
    model = make_tiny_model().to(gpu).train()

    def compute_gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with cab_hf.cab(model, SPARSE_CONFIG):
        expected = compute_gradients()
        model.gradient_checkpointing_enable()
        for actual_gradient, expected_gradient in zip(compute_gradients(), expected, strict=True):
            torch.testing.assert_close(actual_gradient, expected_gradient, rtol=1e-3, atol=1e-5)


NUM_TOKENS = 1024


def build_lora_model(gpu, offload=None):
    """Return a model with LoRA and gradient checkpointing, with equal gradients in every run.

    Args:
        offload: `Offload` of the checkpoints; None to keep them on the device.
    """
    model = make_tiny_model(num_hidden_layers=6, attn_implementation="eager")
    model = with_lora(model.to(gpu, torch.bfloat16), ("q_proj", "o_proj"), 4, 8).train()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    enable_gradient_checkpointing(model)
    if offload is not None:
        offload.install_in_layers(model)
    return model


def run_training_step(model, gpu):
    """Run a forward and a backward pass; return ([loss, *gradients], peak bytes of the device)."""
    ids = draw_token_ids(1, NUM_TOKENS).to(gpu)
    batch = {"input_ids": ids, "position_ids": torch.arange(NUM_TOKENS, device=gpu)[None]}
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    loss = Objective(model)({**batch, "labels": ids})
    loss.backward()
    gradients = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad
    ]
    return [loss.detach(), *gradients], torch.cuda.max_memory_allocated()


class DelayedOffload(Offload):
    """`Offload` with delayed copies: code that does not wait for a copy reads wrong data."""

    def _copy_pieces(self, saved_input, piece_pairs):
        with torch.cuda.stream(self._stream):
            # delay the copy by 20 million clock cycles, so that a missing synchronisation shows
            torch.cuda._sleep(20_000_000)
        super()._copy_pieces(saved_input, piece_pairs)


@pytest.mark.parametrize("offload_class", [Offload, DelayedOffload])
@pytest.mark.parametrize("num_offloaded_layers", [2, 6])
def test_offloaded_checkpoints_are_restored_exactly(gpu, offload_class, num_offloaded_layers):
    expected, expected_peak_bytes = run_training_step(build_lora_model(gpu), gpu)
    offload = offload_class(num_offloaded_layers, torch.device(gpu), 2**16)
    model = build_lora_model(gpu, offload)
    for _ in range(3):
        actual, peak_bytes = run_training_step(model, gpu)
        assert all(map(torch.equal, actual, expected))
    # savings are less than ``num_offloaded_layers`` checkpoints: two checkpoints stay on the
    # device, and the tensors ``expected`` are on the device during the second step
    checkpoint_bytes = NUM_TOKENS * 48 * 2
    assert expected_peak_bytes - peak_bytes > 0.6 * min(num_offloaded_layers, 4) * checkpoint_bytes
    assert offload.host_bytes == num_offloaded_layers * -(-checkpoint_bytes // 2**16) * 2**16
    assert all(chunk.is_pinned() for chunk in offload._free_chunks)


def test_aborted_backward_does_not_change_next_step(gpu):
    offload = DelayedOffload(6, torch.device(gpu), 2**16)
    model = build_lora_model(gpu, offload)
    expected, _ = run_training_step(model, gpu)
    with interrupt_backward(model, 4):
        run_training_step(model, gpu)
    # allocate memory that the offload freed: an unfinished copy would overwrite the zeros
    zeros = [torch.zeros(NUM_TOKENS * 48, device=gpu, dtype=torch.bfloat16) for _ in range(8)]
    torch.cuda.synchronize()
    assert not any(x.any() for x in zeros)
    assert all(map(torch.equal, run_training_step(model, gpu)[0], expected))


def test_tiled_training_equals_untiled(gpu):
    expected, expected_peak_bytes = run_training_step(build_lora_model(gpu), gpu)
    model = build_lora_model(gpu, Offload(3, torch.device(gpu)))
    compute_in_tiles(model, 256)
    actual, peak_bytes = run_training_step(model, gpu)
    assert peak_bytes < expected_peak_bytes
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert (actual_tensor - expected_tensor).norm() <= 0.02 * expected_tensor.norm()


def test_single_gpu_run_reports_memory_and_time(gpu, tmp_path):
    run_command(["python", *BFLOAT16_COMMAND, "--peak-tflops", "1", "--out", str(tmp_path)])
    _, records = read_log(tmp_path / train.LOG_FILE)
    steps_of_run = [record for record in records if record["kind"] == "step"]
    assert len(steps_of_run) == 6 and all(0 < step["density"] < 1 for step in steps_of_run)
    for step in steps_of_run:
        assert 0 < step["mfu"] < step["mfu_dense_equivalent"] and step["peak_gib"] > 0
    *_, last_evaluation = (record for record in records if record["kind"] == "evaluation")
    assert last_evaluation["step"] == 6 and 0 < last_evaluation["held_out_loss"] < 10


@pytest.mark.parametrize("attention", ["cab", "sdpa"])
def test_full_training_uses_bfloat16_products(gpu, attention, tmp_path):
    lora_options = ("--dropout", "0", "--rank", "16", "--alpha", "32")
    training_command = (*TRAIN_COMMAND, "--train", "all", *lora_options, "--attention", attention)
    for dtype in ("float32", "bfloat16"):
        run_command(["python", *training_command, "--dtype", dtype, "--out", str(tmp_path / dtype)])
    float32_losses, bfloat16_losses = (
        read_step_field(tmp_path / dtype, "loss") for dtype in ("float32", "bfloat16")
    )
    assert float32_losses != bfloat16_losses and bfloat16_losses == pytest.approx(
        float32_losses, rel=2e-2
    )


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("config_name", ["ddp_8gpu", "fsdp2_8gpu"])
def test_two_gpus_equal_gradient_accumulation_on_one(gpu, config_name, tmp_path):
    common_options = ("--dropout", "0", "--tokens-per-step", "1024")
    run_command(["python", *BFLOAT16_COMMAND, *common_options, "--out", str(tmp_path / "one")])
    launch_command = ("accelerate", "launch", "--num_processes", "2", "--config_file")
    for run_name, parallel_options in {"data": (), "sequence": ("--cp", "2")}.items():
        config_file = f"finetune/accelerate/{config_name}.yaml"
        training_command = (
            *launch_command,
            config_file,
            *BFLOAT16_COMMAND,
            *common_options,
            *parallel_options,
        )
        run_command([*training_command, "--out", str(tmp_path / run_name)])
        actual, expected = (
            read_step_field(tmp_path / folder_name, "loss") for folder_name in (run_name, "one")
        )
        assert actual == pytest.approx(expected, rel=2e-2)


@NEEDS_TWO_GPUS
def test_every_sharding_is_correct_over_two_gpus(gpu, tmp_path):
    speed_options = ("--shape", "tiny", "--lengths", "4096", "--seconds", "0")
    module_arguments = ("-m", "cab_hf.eval", "speed", "context-parallel")
    run_command([*TORCHRUN_COMMAND, *module_arguments, *speed_options, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    # rows: (one and two ranks) x (dense and sparse) x (forward and backward)
    timed_rows = [row for row in rows if row["measured"] and row["scheme"] != "ring"]
    assert len(timed_rows) == 2 * 4 and all(row["ms"] for row in timed_rows)
