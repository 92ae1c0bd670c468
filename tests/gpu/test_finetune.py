"""Training on CUDA devices: the loop on one, and over two where there are as many."""

import json

import pytest
import torch
from launches import TRAIN, launched, steps
from tiny import SPARSE, tiny_model, tokens
from trained import left_halfway

import cab_hf
from cab_hf.experiment.log import read_log
from cab_hf.finetune import train
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Objective
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.tiles import compute_in_tiles

pytestmark = pytest.mark.gpu
TINY = [*TRAIN, "--dtype", "bfloat16"]
TORCHRUN = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
PAIR = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(autouse=True)
def no_multicast(monkeypatch):
    """Turn off NVLink multicast, which shared machines do not allow."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")


def ended_well(*words):
    done = launched(words)
    assert done.returncode == 0, done.stderr[-2000:]


def test_offloaded_plan_gives_equal_gradients(gpu):
    ids = tokens(1, 600).to(gpu)
    model = tiny_model().to(gpu).train()

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    with cab_hf.cab(model, SPARSE):
        expected = gradients()
        model.gradient_checkpointing_enable()
        for actual, wanted in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-5)


LENGTH = 1024


def long_model(gpu, offload=None):
    # whose gradients are the same in every run
    model = tiny_model(num_hidden_layers=6, attn_implementation="eager")
    model = with_lora(model.to(gpu, torch.bfloat16), ("q_proj", "o_proj"), 4, 8).train()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    enable_gradient_checkpointing(model)
    if offload is not None:
        offload.enable(model)
    return model


def train_step(model, gpu):
    """Return the loss, all gradients, and the peak bytes of a step."""
    ids = tokens(1, LENGTH).to(gpu)
    batch = {"input_ids": ids, "position_ids": torch.arange(LENGTH, device=gpu)[None]}
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    loss = Objective(model)({**batch, "labels": ids})
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *gradients], torch.cuda.max_memory_allocated()


class Late(Offload):
    """Offloading with delayed copies: a reader that does not wait for a copy gets wrong data."""

    def _copy(self, kept, pairs):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(20_000_000)
        super()._copy(kept, pairs)


@pytest.mark.parametrize("kind", [Offload, Late])
@pytest.mark.parametrize("layers", [2, 6])
def test_offloaded_checkpoints_are_restored_exactly(gpu, kind, layers):
    expected, before = train_step(long_model(gpu), gpu)
    offload = kind(layers, torch.device(gpu), 2**16)
    model = long_model(gpu, offload)
    for _ in range(3):
        actual, peak = train_step(model, gpu)
        assert all(map(torch.equal, actual, expected))
    # two are on the device at a time; gradients to compare with are there, too
    checkpoint = LENGTH * 48 * 2
    assert before - peak > 0.6 * min(layers, 4) * checkpoint
    assert offload.host_bytes == layers * -(-checkpoint // 2**16) * 2**16
    assert all(chunk.is_pinned() for chunk in offload._free)


def test_aborted_backward_does_not_change_next_step(gpu):
    offload = Late(6, torch.device(gpu), 2**16)
    model = long_model(gpu, offload)
    expected, _ = train_step(model, gpu)
    with left_halfway(model, 4):
        train_step(model, gpu)
    # tensors that reuse memory into which an unfinished copy could write
    others = [torch.zeros(LENGTH * 48, device=gpu, dtype=torch.bfloat16) for _ in range(8)]
    torch.cuda.synchronize()
    assert not any(other.any() for other in others)
    assert all(map(torch.equal, train_step(model, gpu)[0], expected))


def test_tiled_training_equals_untiled(gpu):
    expected, before = train_step(long_model(gpu), gpu)
    model = long_model(gpu, Offload(3, torch.device(gpu)))
    compute_in_tiles(model, 256)
    actual, peak = train_step(model, gpu)
    assert peak < before
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_single_gpu_run_reports_memory_and_time(gpu, tmp_path):
    ended_well("python", *TINY, "--peak-tflops", "1", "--out", str(tmp_path))
    _, records = read_log(tmp_path / train.LOG)
    made = [each for each in records if each["kind"] == "step"]
    assert len(made) == 6 and all(0 < each["density"] < 1 for each in made)
    for each in made:
        assert 0 < each["mfu"] < each["mfu_dense_equivalent"] and each["peak_gib"] > 0
    (*_, last) = (each for each in records if each["kind"] == "evaluation")
    assert last["step"] == 6 and 0 < last["held_out_loss"] < 10


@pytest.mark.parametrize("attention", ["cab", "sdpa"])
def test_full_training_uses_bfloat16_products(gpu, attention, tmp_path):
    plain = ("--dropout", "0", "--rank", "16", "--alpha", "32")
    words = (*TRAIN, "--train", "all", *plain, "--attention", attention)
    for dtype in ("float32", "bfloat16"):
        ended_well("python", *words, "--dtype", dtype, "--out", str(tmp_path / dtype))
    exact, rounded = (steps(tmp_path / dtype, "loss") for dtype in ("float32", "bfloat16"))
    assert exact != rounded and rounded == pytest.approx(exact, rel=2e-2)


@PAIR
@pytest.mark.parametrize("how", ["ddp_8gpu", "fsdp2_8gpu"])
def test_two_gpus_equal_gradient_accumulation_on_one(gpu, how, tmp_path):
    same = ("--dropout", "0", "--tokens-per-step", "1024")
    ended_well("python", *TINY, *same, "--out", str(tmp_path / "one"))
    launch = ("accelerate", "launch", "--num_processes", "2", "--config_file")
    for name, more in {"data": (), "sequence": ("--cp", "2")}.items():
        words = (*launch, f"finetune/accelerate/{how}.yaml", *TINY, *same, *more)
        ended_well(*words, "--out", str(tmp_path / name))
        actual, wanted = (steps(tmp_path / each, "loss") for each in (name, "one"))
        assert actual == pytest.approx(wanted, rel=2e-2)


@PAIR
def test_every_sharding_is_correct_over_two_gpus(gpu, tmp_path):
    words = ("--shape", "tiny", "--lengths", "4096", "--seconds", "0")
    command = ("-m", "cab_hf.eval", "speed", "context-parallel")
    ended_well(*TORCHRUN, *command, *words, "--out", str(tmp_path))
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    # one rank alone and both together, dense and sparse, in both directions
    timed = [row for row in rows if row["measured"] and row["scheme"] != "ring"]
    assert len(timed) == 2 * 4 and all(row["ms"] for row in timed)
