"""The loop: the README's commands in two processes, killed and resumed; and what a step is."""

import json
import os
import signal

import pytest
import torch
from launches import LAUNCH, MEDDLED, SMALL, TRAIN, launched, losses, steps
from safetensors.torch import load_file
from words import save_llama

from cab_hf.finetune import lora, meter
from cab_hf.runs.log import read_log


def test_two_processes_are_killed_stopped_and_resumed(tmp_path):
    """All that takes a launcher, in as few launches as that takes."""
    script = tmp_path / "meddled.py"
    script.write_text(MEDDLED)
    words = {
        name: " ".join([*TRAIN[1:], "--out", str(tmp_path / name)])
        for name in ("whole", "stopped", "killed")
    }
    words["two"] = " ".join([*SMALL, "--dropout", "0", "--out", str(tmp_path / "two")])
    # the second time it is asked to stop at step 3, it has gone past that
    series = " / ".join(words[name] for name in ("whole", "two", "stopped", "stopped"))
    done = launched([*LAUNCH, str(script), series])
    assert done.returncode == 0, done.stderr[-3000:]
    assert launched([*LAUNCH, str(script), words["killed"]]).returncode != 0
    # killed between two checkpoints, it has to compute step 3 anew
    assert [step for _, step, _ in losses(tmp_path / "killed")] == [1, 2]
    resumed = launched([*LAUNCH, *TRAIN, "--out", str(tmp_path / "killed")])
    assert resumed.returncode == 0, resumed.stderr[-3000:]

    words = ["python", "-m", "cab_hf.finetune.merge", str(tmp_path / "killed" / "adapter")]
    merged = launched([*words, str(tmp_path / "merged")])
    assert merged.returncode == 0, merged.stderr[-3000:]
    assert (tmp_path / "merged" / "model.safetensors").exists()

    check_that_a_killed_run_goes_on_to_the_last_bit(tmp_path)
    check_that_all_processes_stop_where_one_is_asked_to(tmp_path, done.stdout)
    check_that_two_processes_learn_what_one_does_in_two_turns(tmp_path)


def check_that_a_killed_run_goes_on_to_the_last_bit(folder):
    whole, killed = folder / "whole", folder / "killed"
    assert [step for kind, step, _ in losses(whole) if kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert losses(killed) == losses(whole)
    assert steps(killed, "grad_norm") == steps(whole, "grad_norm")
    one, other = (load_file(x / "adapter" / "adapter_model.safetensors") for x in (whole, killed))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_that_all_processes_stop_where_one_is_asked_to(folder, printed):
    assert printed.count("stopped at step 3 as asked; the same command goes on.") == 1
    # of four runs
    assert [(folder / f"meddled.py.{rank}").read_text() for rank in (0, 1)] == ["0000", "0000"]
    assert losses(folder / "stopped") == losses(folder / "whole")
    kept = sorted(path.name for path in (folder / "stopped" / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]


def check_that_two_processes_learn_what_one_does_in_two_turns(folder):
    words = [*SMALL, "--dropout", "0", "--tokens-per-step", "512", "--out", str(folder / "one")]
    assert launched(["python", "finetune/lora.py", *words]).returncode == 0
    for field in ("density", "grad_norm", "loss"):
        one, two = steps(folder / "one", field), steps(folder / "two", field)
        assert one == pytest.approx(two, rel=1e-5)
    # no two steps are alike
    assert len(set(one)) == len(one) == 4


def run(tmp_path, *words, name="run"):
    return lora.main([*SMALL, *words, "--out", str(tmp_path / name)])


def test_a_finished_run_has_left_its_files(tmp_path):
    watched = ["--held-out", "2", "--eval-every", "3", "--passkey-lengths", "192,256"]
    assert run(tmp_path, *watched, "--validation", "retrieval:passkey:256") == 0
    out = tmp_path / "run"
    names = {path.name for path in out.iterdir()}
    assert names == {"log.jsonl", "curve.png", "results.json", "adapter", "checkpoints"}
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert results["processes"] == 1 and results["provenance"]["settings"]["length"] == 256
    assert results["evaluation"]["step"] == 4
    for each in read_log(out / lora.LOG)[1]:
        check_line(each)
    evaluated = [each["step"] for each in read_log(out / lora.LOG)[1] if "passkey" in each]
    assert evaluated == [3, 4]


def check_line(record):
    if record["kind"] == "evaluation":
        assert 0 < record["held_out_loss"] < 10
        assert record["passkey"].keys() == {"192", "256"}
        assert all(0 <= share <= 1 for share in record["passkey"].values())
        return
    assert 0 < record["density"] < 1 and record["grad_norm"] > 0 and record["lr"] > 0
    assert record["tokens_per_second"] == record["tokens_per_second_per_gpu"]
    assert record["tokens_per_second"] * record["seconds"] == pytest.approx(256)
    # nobody knows what a CPU could do
    assert record["mfu"] is None and record["peak_gib"] is None


def test_an_adapter_may_be_rounded_and_what_a_run_goes_on_with_is_not(tmp_path):
    assert run(tmp_path, "--adapter-dtype", "bfloat16") == 0
    assert run(tmp_path, name="whole") == 0
    rounded, whole = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("run", "whole")
    )
    assert {x.dtype for x in rounded.values()} == {torch.bfloat16}
    assert {name: x.bfloat16() for name, x in whole.items()}.keys() == rounded.keys()
    for name, x in whole.items():
        assert x.dtype == torch.float32 and torch.equal(x.bfloat16(), rounded[name])
    shared = torch.load(next((tmp_path / "run").rglob("shared.pt")), weights_only=True)
    assert {x.dtype for x in shared["parameters"].values()} == {torch.float32}


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
        pytest.param(["--length", "8192"], "8192", id="positions"),
        pytest.param(["--targets", "q_prj"], "did you mean q_proj?", id="target"),
        pytest.param(["--passkey-lengths", "64"], "64 has no room for 1 keys", id="keys"),
        pytest.param(["--data", "gone.txt"], "gone.txt", id="data"),
        pytest.param(["--cab", "mas=1"], "mas", id="cab"),
        pytest.param(["--trackers", "wandb"], "pip install wandb", id="tracker"),
        pytest.param(["--model", "/nowhere"], "'/nowhere' is not here", id="model"),
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
