"""Training on CUDA devices: the loop on one, and over two where there are as many."""

import json

import pytest
import torch
from launches import TRAIN, launched, steps
from tiny import SPARSE, tiny_model, tokens

import cab_hf
from cab_hf.finetune import lora
from cab_hf.runs.log import read_log

pytestmark = pytest.mark.gpu
TINY = [*TRAIN, "--dtype", "bfloat16"]
TORCHRUN = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
PAIR = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(autouse=True)
def no_multicast(monkeypatch):
    """Multicast over NVLink is not for machines that others share."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")


def ended_well(*words):
    done = launched(words)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_plan_kept_in_the_hosts_memory_is_the_plan(gpu):
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


def test_a_run_on_one_gpu_tells_what_it_took(gpu, tmp_path):
    ended_well("python", *TINY, "--peak-tflops", "1", "--out", str(tmp_path))
    _, records = read_log(tmp_path / lora.LOG)
    made = [each for each in records if each["kind"] == "step"]
    assert len(made) == 6 and all(0 < each["density"] < 1 for each in made)
    for each in made:
        assert 0 < each["mfu"] < each["mfu_dense_equivalent"] and each["peak_gib"] > 0
    (*_, last) = (each for each in records if each["kind"] == "evaluation")
    assert last["step"] == 6 and 0 < last["held_out_loss"] < 10


@PAIR
@pytest.mark.parametrize("how", ["ddp_8gpu", "fsdp2_8gpu"])
def test_two_gpus_learn_what_one_does_in_turns(gpu, how, tmp_path):
    same = ("--dropout", "0", "--tokens-per-step", "1024")
    ended_well("python", *TINY, *same, "--out", str(tmp_path / "one"))
    launch = ("accelerate", "launch", "--num_processes", "2", "--config_file")
    for name, more in {"data": (), "sequence": ("--cp", "2")}.items():
        words = (*launch, f"finetune/accelerate/{how}.yaml", *TINY, *same, *more)
        ended_well(*words, "--out", str(tmp_path / name))
        actual, wanted = (steps(tmp_path / each, "loss") for each in (name, "one"))
        assert actual == pytest.approx(wanted, rel=2e-2)


@PAIR
def test_every_scheme_is_right_over_two_gpus(gpu, tmp_path):
    words = ("--shape", "tiny", "--lengths", "4096", "--seconds", "0", "--link-mib", "1,4")
    command = ("-m", "cab_hf.eval", "speed", "context-parallel")
    ended_well(*TORCHRUN, *command, *words, "--out", str(tmp_path))
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    turns = [row for row in rows if row["measured"] and row["scheme"] not in ("links", "ring")]
    assert len(turns) == 2 * 6 and all(row["ms"] for row in turns)
