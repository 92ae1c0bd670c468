"""The loop: the README's commands in two processes, killed and resumed; and what a step is."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from words import save_llama

from cab_hf.finetune import lora, meter
from cab_hf.runs.log import read_log

ROOT = Path(__file__).parents[1]
LAUNCH = ["accelerate", "launch", "--config_file", "finetune/accelerate/cpu_2.yaml"]
TRAIN = ["finetune/lora.py", "--config", "finetune/configs/tiny_cpu.yaml"]
SMALL = [
    *("--config", str(ROOT / "finetune" / "configs" / "tiny_cpu.yaml"), "--cpu"),
    *("--data", "retrieval:passkey:256", "--length", "256", "--steps", "4", "--save-every", "9"),
    *("--eval-every", "0", "--held-out", "0"),
]
# the same program, with a few words to each of its processes
MEDDLED = """
import os, signal, sys
from cab_hf.finetune import lora

rank, step = int(os.environ["RANK"]), lora.Run._step

def meddled(run, at, asked):
    if "killed" in run.settings.out and at == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if "stopped" in run.settings.out and at == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(run, at, asked)

lora.Run._step = meddled
# several runs of the same processes
lora.Accelerator.end_training = lambda self: None
for words in sys.argv[1].split(" / "):
    status = lora.main(words.split())
    print("status", status, flush=True)
    if status:
        raise SystemExit(status)
"""


def launched(words):
    """A command line that has ended, run by this Python's accelerate."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *words[2:]]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def losses(out):
    _, records = read_log(out / lora.LOG)
    return [
        (each["kind"], each["step"], each.get("loss", each.get("held_out_loss")))
        for each in records
    ]


def steps(out, field):
    _, records = read_log(out / lora.LOG)
    return [each[field] for each in records if each["kind"] == "step"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs of two processes: whole, stopped and gone on, and killed."""
    folder = tmp_path_factory.mktemp("runs")
    script = folder / "meddled.py"
    script.write_text(MEDDLED)
    words = {
        name: " ".join([*TRAIN[1:], "--out", str(folder / name)])
        for name in ("whole", "stopped", "killed")
    }
    words["plain"] = f"{' '.join(SMALL)} --dropout 0 --out {folder / 'plain'}"
    # the second time it is asked to stop, it has gone past that
    series = " / ".join(words[name] for name in ("whole", "plain", "stopped", "stopped"))
    done = launched([*LAUNCH, str(script), series])
    assert done.returncode == 0, done.stderr[-3000:]
    killed = launched([*LAUNCH, str(script), words["killed"]])
    assert killed.returncode != 0
    (folder / "printed").write_text(done.stdout)
    (folder / "at the kill").write_text(json.dumps(losses(folder / "killed")))
    resumed = launched([*LAUNCH, *TRAIN, "--out", str(folder / "killed")])
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    return folder


def test_a_killed_run_goes_on_to_the_last_bit(runs):
    whole, killed = losses(runs / "whole"), losses(runs / "killed")
    assert [step for kind, step, _ in whole if kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert killed == whole
    # it was killed between two checkpoints, and so has computed step 3 anew
    assert [step for _, step, _ in json.loads((runs / "at the kill").read_text())] == [1, 2]
    norms = [steps(runs / name, "grad_norm") for name in ("whole", "killed")]
    assert norms[0] == norms[1]
    tensors = [
        load_file(runs / name / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "killed")
    ]
    assert all(torch.equal(x, tensors[1][name]) for name, x in tensors[0].items())


def test_all_processes_stop_where_one_is_asked_to(runs):
    printed = (runs / "printed").read_text()
    assert printed.count("stopped at step 3 as asked; the same command goes on.") == 1
    assert printed.count("status 0") == 8 and "status 2" not in printed
    assert losses(runs / "stopped") == losses(runs / "whole")
    kept = sorted(path.name for path in (runs / "stopped" / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]


def test_two_processes_learn_what_one_does_in_two_micro_batches(runs, tmp_path):
    words = [*SMALL, "--dropout", "0", "--tokens-per-step", "512", "--out", str(tmp_path / "one")]
    assert lora.main(words) == 0
    for field in ("loss", "grad_norm"):
        one, two = steps(tmp_path / "one", field), steps(runs / "plain", field)
        assert one == pytest.approx(two, rel=1e-5)
    # no two steps are alike
    assert len(set(one)) == len(one) == 4


def test_a_finished_run_has_left_its_files(runs):
    names = {path.name for path in (runs / "whole").iterdir()}
    assert names == {"log.jsonl", "curve.png", "results.json", "adapter", "checkpoints"}
    assert (runs / "whole" / "curve.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((runs / "whole" / "results.json").read_text())
    assert results["processes"] == 2 and results["provenance"]["settings"]["length"] == 512
    assert results["evaluation"][0]["step"] == 6


def test_every_step_has_a_line_with_all_of_it(runs):
    _, records = read_log(runs / "whole" / lora.LOG)
    for each in records:
        if each["kind"] == "evaluation":
            assert 0 < each["held_out_loss"] < 10
            assert all(0 <= share <= 1 for share in each["passkey"].values())
            assert each["passkey"].keys() == {"256", "512"}
            continue
        assert 0 < each["density"] < 1 and each["grad_norm"] > 0 and each["lr"] > 0
        assert each["tokens_per_second"] == pytest.approx(2 * each["tokens_per_second_per_gpu"])
        assert each["tokens_per_second"] * each["seconds"] == pytest.approx(2 * 512)
        # nobody knows what a CPU could do
        assert each["mfu"] is None and each["peak_gib"] is None
    assert {each["step"] for each in records if each["kind"] == "evaluation"} == {3, 6}


def run(tmp_path, *words, name="run"):
    return lora.main([*SMALL, *words, "--out", str(tmp_path / name)])


def test_micro_batches_and_accumulation_are_one_step(tmp_path):
    assert run(tmp_path, "--dropout", "0", "--micro-batch", "2", name="rows") == 0
    assert run(tmp_path, "--dropout", "0", "--tokens-per-step", "512", name="turns") == 0
    for field in ("loss", "grad_norm"):
        rows, turns = (steps(tmp_path / name, field) for name in ("rows", "turns"))
        assert rows == pytest.approx(turns, rel=1e-5)


def test_other_settings_do_not_go_on_with_a_run(tmp_path, capsys):
    assert run(tmp_path, "--steps", "3") == 0
    capsys.readouterr()
    assert run(tmp_path, "--steps", "3", "--lr", "1e-3") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "log.jsonl was made with lr 0.002, this run has 0.001; give another --out" in line


def test_a_run_that_is_done_stays_as_it_is(tmp_path):
    assert run(tmp_path) == 0
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    assert run(tmp_path) == 0
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before


def test_dense_layers_are_logged_as_dense(tmp_path):
    assert run(tmp_path, "--attention", "sdpa", "--peak-tflops", "1") == 0
    assert steps(tmp_path / "run", "density") == [1.0] * 4
    for useful, dense in zip(
        *(steps(tmp_path / "run", name) for name in ("mfu", "mfu_dense_equivalent")), strict=True
    ):
        assert 0 < useful == dense < 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param(
            ["--tokens-per-step", "300"], "tokens_per_step must be a multiple", id="steps"
        ),
        pytest.param(["--length", "4096"], "4096", id="positions"),
        pytest.param(["--targets", "q_prj"], "did you mean q_proj?", id="target"),
        pytest.param(["--data", "gone.txt"], "gone.txt", id="data"),
        pytest.param(["--cab", "mas=1"], "mas", id="cab"),
        pytest.param(["--trackers", "wandb"], "pip install wandb", id="tracker"),
        pytest.param(["--model", "/nowhere"], "'/nowhere' cannot be loaded", id="model"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    assert run(tmp_path, *words) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith(lora.PROG)]
    assert told in line
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_running_out_of_memory_names_three_settings(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(lora.Run, "_gradients", full)
    assert run(tmp_path, "--micro-batch", "2", "--checkpointing", "false") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    order = "change, in this order, --micro-batch 1, --checkpointing true, --qlora"
    assert order in line


def test_a_dry_run_says_what_it_would_be(tmp_path, capsys):
    model = save_llama(tmp_path / "model")
    words = ["--model", str(model), "--length", "1024", "--tokens-per-step", "4096", "--dry-run"]
    assert run(tmp_path, *words) == 0
    printed = capsys.readouterr().out
    settings = lora.read([*SMALL, *words])
    built, _ = lora.build(settings, torch.device("cpu"))
    cost = meter.Cost.of(built)
    assert f"parameters: {cost.parameters:,}, {cost.trained_parameters:,} of them tr" in printed
    pairs = 4 * 1024 * 1025 // 2
    flops = cost.products(4096) + 2 * cost.attention(pairs)
    assert f"{flops:.3e}" in printed and "fits into" in printed and '"lr": 0.002' in printed
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_told_before_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lora.dry_run, "capacity", lambda device: 2**20)
    assert run(tmp_path, "--dry-run") == 0
    assert "does not fit into 0.0 GiB" in capsys.readouterr().out


def test_sigterm_saves_and_ends_well(tmp_path, monkeypatch, capsys):
    step = lora.Run._step

    def asked(self, at, asked):
        if at == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, at, asked)

    with monkeypatch.context() as patched:
        patched.setattr(lora.Run, "_step", asked)
        assert run(tmp_path) == 0
    assert capsys.readouterr().out == "stopped at step 2 as asked; the same command goes on.\n"
    assert run(tmp_path) == 0
    assert run(tmp_path, name="whole") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
