"""Training on CUDA devices: the loop on one, and over two where there are as many."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import SPARSE, tiny_model, tokens

import cab_hf

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[1]
TINY = ["finetune/lora.py", "--config", "finetune/configs/tiny_cpu.yaml", "--dtype", "bfloat16"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
PAIR = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def python(*words):
    """What ran ``python -m`` or ``python FILE`` has printed; it must end well."""
    command = [sys.executable, *([] if words[0].endswith(".py") else ["-m"]), *words]
    # multicast over NVLink is not for machines that others share
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def records(out, kind):
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [each for each in lines if each.get("kind") == kind]


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
        for found, wanted in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_a_run_on_one_gpu_tells_what_it_took(gpu, tmp_path):
    python(*TINY, "--peak-tflops", "1", "--out", str(tmp_path))
    steps = records(tmp_path, "step")
    assert len(steps) == 6 and all(0 < each["density"] < 1 for each in steps)
    for each in steps:
        assert 0 < each["mfu"] < each["mfu_dense_equivalent"] and each["peak_gib"] > 0
    (*_, last) = records(tmp_path, "evaluation")
    assert last["step"] == 6 and 0 < last["held_out_loss"] < 10


@PAIR
@pytest.mark.parametrize("how", ["ddp_8gpu", "fsdp2_8gpu"])
def test_two_gpus_learn_what_one_does_in_turns(gpu, how, tmp_path):
    same = ("--dropout", "0", "--tokens-per-step", "1024")
    python(*TINY, *same, "--out", str(tmp_path / "one"))
    launch = ("accelerate.commands.launch", "--num_processes", "2", "--config_file")
    for name, more in {"data": (), "sequence": ("--cp", "2")}.items():
        words = (*launch, f"finetune/accelerate/{how}.yaml", *TINY, *same, *more)
        python(*words, "--out", str(tmp_path / name))
        for found, wanted in zip(
            records(tmp_path / name, "step"), records(tmp_path / "one", "step"), strict=True
        ):
            assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-2)


@PAIR
def test_every_scheme_is_right_over_two_gpus(gpu, tmp_path):
    words = ("--shape", "tiny", "--lengths", "4096", "--seconds", "0", "--link-mib", "1,4")
    command = ("-m", "cab_hf.eval", "speed", "context-parallel")
    python(*TORCHRUN, *command, *words, "--out", str(tmp_path))
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    turns = [row for row in rows if row["measured"] and row["scheme"] not in ("links", "ring")]
    assert len(turns) == 2 * 6 and all(row["ms"] for row in turns)
