"""Training runs: files, resuming, comparison with a plain loop, and errors of settings."""

import errno
import json
import os
import re
import signal

import pytest
import torch
from launches import (
    LAUNCH_COMMAND,
    PROGRAM_WITH_ERRORS,
    SHORT_RUN_OPTIONS,
    TRAIN_COMMAND,
    assert_same_run,
    assert_same_tensors,
    load_saved_weights,
    read_losses,
    read_step_field,
    run_process,
)
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save
from tiny import SPARSE
from words import TEXT, save_llama

from cab_hf.experiment.log import read_log
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import cost_model, lora, merge, train
from cab_hf.finetune.data import Packed
from cab_hf.finetune.models import load_model
from cab_hf.finetune.objective import learning_rate
from cab_hf.finetune.sources import make_source

# names of runs in which `MEDDLED` injects an error into one process
FAULTY_RUNS = ("spoilt", "spoilt-weights", *(f"spoilt-source-{x}" for x in "dv"))


def two_machines(folder, name):
    """Write data of two machines: a file in folder 0 and a file of the same name in folder 1.

    Only the last documents of the files differ. Returns the path of the file in folder 0.
    """
    for rank in "01":
        (folder / rank).mkdir(exist_ok=True)
        lines = [json.dumps({"text": TEXT * 4})] * 200 + [json.dumps({"text": rank * 200})]
        (folder / rank / f"{name}.jsonl").write_text("\n".join(lines))
    return folder / "0" / f"{name}.jsonl"


@pytest.mark.slow
def test_two_processes_resume_after_kill_and_stop(tmp_path):
    """Test all behaviour of two processes with few launches, because a launch is slow."""
    (script := tmp_path / "meddled.py").write_text(PROGRAM_WITH_ERRORS)
    commands = {
        name: " ".join([*TRAIN_COMMAND[1:], "--out", str(tmp_path / name)])
        for name in ("whole", "stopped", "killed", *FAULTY_RUNS)
    }
    commands["spoilt-source-d"] += f" --data {two_machines(tmp_path, 'data')}"
    commands["spoilt-source-v"] += f" --validation {two_machines(tmp_path, 'validation')}"
    commands["two"] = " ".join(
        [*SHORT_RUN_OPTIONS, "--dropout", "0", "--out", str(tmp_path / "two")]
    )
    # the second "stopped" run resumes after step 3, so that it does not stop again
    series = " / ".join(
        commands[name] for name in ("whole", "two", *FAULTY_RUNS, "stopped", "stopped")
    )
    process = run_process([*LAUNCH_COMMAND, str(script), series])
    assert process.returncode == 0, process.stderr[-3000:]
    assert run_process([*LAUNCH_COMMAND, str(script), commands["killed"]]).returncode != 0
    # the run was killed between the checkpoints of steps 2 and 4, so that it computes step 3 again
    assert [step for _, step, _ in read_losses(tmp_path / "killed")] == [1, 2]
    one = ["--tokens-per-step", "512", "--dropout", "0", "--out", str(tmp_path / "one")]
    merge = ["-m", "cab_hf.finetune.merge", str(tmp_path / "killed" / "adapter")]
    for command in (
        [*LAUNCH_COMMAND, *TRAIN_COMMAND, "--out", str(tmp_path / "killed")],
        ["python", *merge, str(tmp_path / "merged")],
        ["python", "finetune/lora.py", *SHORT_RUN_OPTIONS, *one],
    ):
        later_process = run_process(command)
        assert later_process.returncode == 0, later_process.stderr[-3000:]
    assert (tmp_path / "merged" / "model.safetensors").exists()

    # a killed run continues bit-identically
    assert read_step_field(tmp_path / "whole", "step") == [1, 2, 3, 4, 5, 6]
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    # both processes stop if one receives SIGTERM
    message = "stopped at step 3 on request; the same command continues."
    assert process.stdout.count(message) == 1
    statuses = [(tmp_path / f"meddled.py.{rank}").read_text() for rank in (0, 1)]
    assert statuses == ["00222200"] * 2
    assert read_losses(tmp_path / "stopped") == read_losses(tmp_path / "whole")
    names = sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]
    # two processes equal one process with two accumulation steps; no two steps have equal values
    for field in ("density", "grad_norm", "loss"):
        of_one, of_two = (
            read_step_field(tmp_path / "one", field),
            read_step_field(tmp_path / "two", field),
        )
        assert of_one == pytest.approx(of_two, rel=1e-5)
    assert len(set(of_one)) == len(of_one) == 4
    # both processes stop if one has a NaN gradient, and both name the parameter
    message = "step 3 has a gradient that is not finite, the first in base_model"
    assert process.stderr.count(message) == 2
    assert [step for _, step, _ in read_losses(tmp_path / "spoilt")] == [1, 2]
    (checkpoint,) = (tmp_path / "spoilt" / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000002"
    # if weights or data differ between processes, the run stops before the first step
    weight = "weight base_model.model.model.layers.1.mlp.up_proj.weight"
    sources = [f"the content of source 1 of --{setting}" for setting in ("data", "validation")]
    for fact in (weight, *sources):
        message = f"{fact} must be equal in all processes, got another value in process 1"
        assert process.stderr.count(message) == 2
    assert not any((tmp_path / name).exists() for name in FAULTY_RUNS[1:])


def run(tmp_path, words=(), *, name="run", draws_curve=False):
    """Train in this process with `SHORT_RUN_OPTIONS` and ``words``; return the exit status."""
    with pytest.MonkeyPatch.context() as patch:
        # drawing the loss curve takes as long as the training
        if not draws_curve:
            patch.setattr(train.curve, "draw_curve", lambda *_: None)
        return lora.main([*SHORT_RUN_OPTIONS, *words, "--out", str(tmp_path / name)])


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Train with the options `SMALL`, and return the folder of the finished run."""
    folder = tmp_path_factory.mktemp("finished")
    assert run(folder) == 0
    return folder / "run"


def read_error_message(capsys):
    """Return the error message that the command printed; there must be exactly one."""
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith(lora.PROG)]
    return line


def train_until(tmp_path, last, words=()):
    """Run a training that receives SIGTERM during step ``last``."""
    original_step = train.Run._run_step

    def stopped_step(self, step, stop_request):
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)
        return original_step(self, step, stop_request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "_run_step", stopped_step)
        assert run(tmp_path, words) == 0
    assert len(read_step_field(tmp_path / "run", "loss")) == last


def test_run_with_validation_writes_files_and_complete_log(tmp_path):
    words = ["--held-out", "2", "--eval-every", "3", "--passkey-lengths", "192,256"]
    words += ["--validation", "retrieval:passkey:256"]
    assert run(tmp_path, words, draws_curve=True) == 0
    out = tmp_path / "run"
    names = {path.name for path in out.iterdir()}
    assert names == {"log.jsonl", "curve.png", "results.json", "adapter", "checkpoints"}
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert results["processes"] == 1 and results["provenance"]["settings"]["length"] == 256
    assert results["evaluation"]["step"] == 4
    for record in read_log(out / train.LOG_FILE)[1]:
        if record["kind"] == "evaluation":
            assert record["step"] in (3, 4) and 0 < record["held_out_loss"] < 10
            assert record["passkey"].keys() == {"192", "256"}
        if record["kind"] == "step":
            assert 0 < record["density"] < 1 and record["grad_norm"] > 0 and record["lr"] > 0
            assert record["tokens_per_second"] == record["tokens_per_second_per_gpu"]
            assert record["tokens_per_second"] * record["seconds"] == pytest.approx(256)
            # "mfu" is None, because the peak FLOP/s of a CPU are unknown
            assert record["mfu"] is None and record["peak_gib"] is None


def test_saved_adapter_is_rounded_but_checkpoint_is_not(tmp_path, finished_run):
    assert run(tmp_path, ["--adapter-dtype", "bfloat16"]) == 0
    unrounded = load_saved_weights(finished_run)
    assert {x.dtype for x in unrounded.values()} == {torch.float32}
    assert_same_tensors(
        load_saved_weights(tmp_path / "run"), {name: x.bfloat16() for name, x in unrounded.items()}
    )
    shared = torch.load(next((tmp_path / "run").rglob("shared.pt")), weights_only=True)
    assert {x.dtype for x in shared["parameters"].values()} == {torch.float32}


def test_full_budget_run_matches_peft_loop(tmp_path):
    """Compare with a plain PEFT loop with SDPA, the same data and the same learning rates."""
    words = ["--cab", "mass_threshold=0", "--dropout", "0", "--data", "retrieval:keys:100"]
    words += ["--steps", "8", "--lr", "1e-2"]
    assert run(tmp_path, words) == 0
    settings = lora.read([*SHORT_RUN_OPTIONS, *words])
    torch.manual_seed(settings.seed)
    model, tokenizer = load_model("tiny", dtype="float32", attn_implementation="sdpa")
    fields = {"r": settings.rank, "lora_alpha": settings.alpha}
    model = get_peft_model(model, LoraConfig(**fields, target_modules=list(settings.targets)))
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, settings.beta2), weight_decay=0.0)
    sources = [(make_source(name), share) for name, share in settings.parse_sources()]
    packed, expected = Packed(tokenizer, sources, settings.length, 0, hold_out=0), []
    for step in range(1, 9):
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings)
        batch = {name: x[None] for name, x in next(packed).items()}
        labels = batch.pop("labels").flatten()
        loss = torch.nn.functional.cross_entropy(model(**batch, use_cache=False).logits[0], labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert read_step_field(tmp_path / "run", "density") == [1.0] * 8
    assert read_step_field(tmp_path / "run", "loss") == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.97 * expected[0]


# by name: the options of two runs that must have equal losses
EQUIVALENT = {
    "micro batches": (["--micro-batch", "2"], ["--tokens-per-step", "512"]),
    "tiles and offloaded checkpoints": ([], ["--tile-tokens", "48", "--offload-layers", "1"]),
}


@pytest.mark.parametrize(("words", "other_words"), EQUIVALENT.values(), ids=EQUIVALENT)
def test_memory_options_do_not_change_losses(tmp_path, words, other_words):
    assert run(tmp_path, ["--dropout", "0", *words], name="one") == 0
    assert run(tmp_path, ["--dropout", "0", *other_words], name="other") == 0
    for field in ("loss", "grad_norm"):
        expected = read_step_field(tmp_path / "one", field)
        assert read_step_field(tmp_path / "other", field) == pytest.approx(expected, rel=1e-5)


# by option: a file whose content a resumed run must compare with the content at its start
CONTENTS = {
    "data": "data.jsonl",
    "validation": "validation.jsonl",
    "calibration": "calibration.json",
    "model": "model/model.safetensors",
}


def change_content(file):
    """Return the content of ``file`` with changed weights, words or mass threshold."""
    if file.suffix == ".safetensors":
        return save({name: x + 0.1 for name, x in load_file(file).items()})
    threshold = '"mass_threshold": 0.'
    return file.read_text().replace("It", "He").replace(threshold, f"{threshold}1").encode()


def test_changed_content_under_same_name_raises(tmp_path, capsys):
    save_llama(tmp_path / "model")
    SPARSE.save(tmp_path / "calibration.json")
    for kind, count in (("data", 20), ("validation", 15)):
        (tmp_path / f"{kind}.jsonl").write_text(json.dumps({"text": TEXT * count}) + "\n")
    words = ["--held-out", "1", "--passkeys", "0", "--steps", "3"]
    for name, file in CONTENTS.items():
        words += [f"--{name}", str(tmp_path / file.partition("/")[0])]
    assert run(tmp_path, words) == 0
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    # new time stamps do not count as changed content
    for file in tmp_path.rglob("*.json*"):
        os.utime(file, (1, 1))
    assert run(tmp_path, words) == 0
    capsys.readouterr()
    for option, name in CONTENTS.items():
        file = tmp_path / name
        original_content, changed_content = file.read_bytes(), change_content(file)
        assert changed_content != original_content
        file.write_bytes(changed_content)
        assert run(tmp_path, words) == 2
        field = f"{option}.{file}" if option in ("data", "validation") else option
        assert f"log.jsonl was made with sha256.{field} '" in read_error_message(capsys)
        assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
        file.write_bytes(original_content)


@pytest.mark.parametrize("is_truncated", [False, True], ids=["log lost", "log truncated"])
def test_checkpoint_of_another_run_raises(tmp_path, capsys, finished_run, is_truncated):
    train_until(tmp_path, 2)
    out = tmp_path / "run"
    text = (out / train.LOG_FILE).read_text()
    (out / train.LOG_FILE).unlink()
    if is_truncated:
        (out / train.LOG_FILE).write_text(text[:30])
    assert run(tmp_path, ["--lr", "1e-3"]) == 2
    assert "checkpoints/step-00000002 was made with lr 0.002" in read_error_message(capsys)
    # with its original settings, the run continues
    assert run(tmp_path) == 0
    assert "log.jsonl has 0 of the 2 steps that were made before." in capsys.readouterr().out
    assert read_losses(out) == read_losses(finished_run)[2:]


def test_finished_run_is_unchanged_and_cleaned_up(finished_run, capsys):
    half_removed = finished_run / "checkpoints" / ".step-00000002.removed"
    log = (finished_run / train.LOG_FILE).read_bytes()
    half_removed.mkdir()
    assert run(finished_run.parent) == 0 and not half_removed.exists()
    # with other settings, the run does not continue
    assert run(finished_run.parent, ["--lr", "1e-3"]) == 2
    assert "log.jsonl was made with lr 0.002, this run has 0.001" in read_error_message(capsys)
    assert (finished_run / train.LOG_FILE).read_bytes() == log


# train all weights; --rank and --alpha reset the values of the config file to their defaults
ALL = ["--train", "all", "--dropout", "0", "--rank", "16", "--alpha", "32"]
# sampled blocks and dropout use random generators, whose states a checkpoint must contain
SAMPLED = ["--cab", "sampled_one_in=3", "--dropout", "0.1", "--checkpointing", "true"]
# 4-bit weights with an evaluation after each step, which must not change the weights
QLORA = ["--qlora", "--held-out", "1", "--eval-every", "1", "--validation", "retrieval:passkey:256"]


def dynamic(folder):
    """Return options of a run with dynamic RoPE whose first sequence is longer than later ones."""
    config = save_llama(folder / "model") / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 100})
    )
    model = ["--model", str(config.parent), "--rope", "dynamic", "--attention", "sdpa"]
    return [*model, "--data", "retrieval:passkey:256=1,retrieval:passkey:120=40"]


@pytest.mark.parametrize(
    ("words", "last"),
    [
        *((lambda _: [], 2), (lambda _: SAMPLED, 1), (dynamic, 2)),
        (lambda folder: [*ALL, "--model", str(save_llama(folder / "base"))], 2),
        (lambda _: [*ALL, "--dtype", "bfloat16"], 2),
        (lambda _: QLORA, 2),
    ],
    ids=["adapter", "sampled blocks", "dynamic", "all weights", "products in bfloat16", "nf4"],
)
def test_stopped_run_resumes_bit_identically(tmp_path, capsys, finished_run, words, last):
    words = words(tmp_path)
    assert not words or run(tmp_path, words, name="whole") == 0
    capsys.readouterr()
    train_until(tmp_path, last, words)
    message = f"stopped at step {last} on request; the same command continues.\n"
    assert capsys.readouterr().out == message
    assert run(tmp_path, words) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole" if words else finished_run)


def test_adapter_of_4_bit_weights_merges_into_base(tmp_path, capsys):
    assert run(tmp_path, ["--qlora"]) == 0
    assert merge.main([str(tmp_path / "run" / "adapter"), str(tmp_path / "merged")]) == 0
    assert "merged; the largest difference of a logit is" in capsys.readouterr().out
    merged, _ = load_model(str(tmp_path / "merged"), dtype="float32")
    assert not any(hasattr(weight, "quant_state") for weight in merged.parameters())


def test_full_training_saves_model_that_loads_identically(tmp_path, monkeypatch):
    runs, losses_of, end = [], {}, train.Run._write_results
    monkeypatch.setattr(
        train.Run, "_write_results", lambda self, log: (runs.append(self), end(self, log))
    )
    words = [*ALL, "--model", str(save_llama(tmp_path / "base")), "--steps", "12", "--lr", "1e-2"]
    base, ids = load_file(tmp_path / "base" / "model.safetensors"), torch.arange(3, 40)[None]
    for dtype in ("float32", "bfloat16"):
        assert run(tmp_path, [*words, "--dtype", dtype], name=dtype) == 0
        weights, trained = load_saved_weights(tmp_path / dtype), runs.pop().model.eval()
        assert base.keys() == weights.keys()
        assert not any(torch.equal(weight, base[name]) for name, weight in weights.items())
        loaded, _ = load_model(str(tmp_path / dtype / "model"), dtype="float32")
        assert {x.dtype for x in trained.parameters()} == {torch.float32}
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, trained(ids).logits)
        losses_of[dtype] = read_step_field(tmp_path / dtype, "loss")
    exact, rounded = losses_of.values()
    assert exact[-1] < 0.6 * exact[0]
    # adapter products in bfloat16 instead of float32 change the losses slightly
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.05)


# cases "OPTIONS > PART OF THE ERROR MESSAGE", separated by ";" or line ends
REFUSED = """
--tokens-per-step 300 > tokens_per_step ; --length 8192 > length must be at most 4096
--targets q_prj > targets must be names of linear layers ; --passkey-lengths 64 > passkey_lengths
--cp 2 --length 512 > cp must divide the 1 processes ; --data gone.txt > gone.txt
--data gone.txt --dry-run > gone.txt ; --model /nowhere > '/nowhere' does not exist
--attention falsh > or give another attn_implementation. ; --attention falsh --dry-run > attention
--cab mas=1 > mas ; --cab redundancy=3 --attention sdpa > redundancy must be in [0, 1], got 3
--dry-run --gpu-gib 1e-4 > got 256 ; --adapter nowhere > adapter must be a folder
"""


@pytest.mark.parametrize("case", re.split(r" ; |\n", REFUSED.strip()))
def test_unsupported_settings_exit_with_one_line(tmp_path, capsys, case):
    words, _, message = case.partition(" > ")
    assert run(tmp_path, words.split()) == 2
    assert message in read_error_message(capsys)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_foreign_output_folder_raises(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    assert run(tmp_path) == 2 and "out must be" in read_error_message(capsys)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


# by name: (injected error, part of the printed message; None: the error propagates)
ERRORS = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "--micro-batch"),
    "disk": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
    "bug with files": (OSError(errno.EBADF, os.strerror(errno.EBADF)), None),
}


@pytest.mark.parametrize(("error", "message"), ERRORS.values(), ids=ERRORS)
def test_out_of_memory_exits_with_one_line(tmp_path, monkeypatch, capsys, error, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(train.Run, "_accumulate_gradients", fail)
    if message is None:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            run(tmp_path)
        return
    assert run(tmp_path) == 2
    assert message in read_error_message(capsys)


def test_dry_run_prints_estimates(tmp_path, capsys):
    model = save_llama(tmp_path / "model")
    words = ["--model", str(model), "--length", "1024", "--tokens-per-step", "4096", "--dry-run"]
    assert run(tmp_path, words) == 0
    printed = capsys.readouterr().out
    settings = lora.read([*SHORT_RUN_OPTIONS, *words])
    model, _ = train.build_model(settings, torch.device("cpu"))
    cost = cost_model.Cost.of(model)
    assert (
        f"parameters: {cost.num_parameters:,}, trained: {cost.num_trained_parameters:,}" in printed
    )
    pairs = 4 * 1024 * 1025 // 2
    flops = cost.product_flops(4096) + sum(cost.attention_flops([pairs] * 2))
    assert f"{flops:.3e}" in printed and "fits into" in printed and '"lr": 0.002' in printed
    assert not (tmp_path / "run").exists()


WEIGHT = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
# by part of the run that becomes NaN: (options, pattern of the message)
SPOILT_BY = {
    "base": ([], "step 1 has a weight that is not finite, .* in base"),
    "rate": (["--lr", "1e25"], f"step 2 has a gradient .* in {WEIGHT}A"),
    "state": (["--save-every", "1"], f"step 1 has values that are not finite in {WEIGHT}B"),
    "evaluation": (["--eval-every", "1"], "log.jsonl must contain finite numbers only"),
}


@pytest.mark.parametrize("spoilt", SPOILT_BY)
def test_nan_ends_run_before_saving(tmp_path, monkeypatch, capsys, spoilt):
    build, step, nan = train.build_model, torch.optim.AdamW.step, float("nan")

    def spoilt_build(settings, device):
        model, tokenizer = build(settings, device)
        model.get_base_model().model.layers[1].mlp.up_proj.weight.data[3, 3] = nan
        return model, tokenizer

    def spoilt_step(optimizer, closure=None):
        step(optimizer, closure)
        optimizer.param_groups[0]["params"][1].data[0, 0] = nan

    if spoilt == "base":
        monkeypatch.setattr(train, "build_model", spoilt_build)
    if spoilt == "state":
        monkeypatch.setattr(torch.optim.AdamW, "step", spoilt_step)
    if spoilt == "evaluation":
        result = {"held_out_loss": nan, "passkey": {}}
        monkeypatch.setattr(train.Validation, "measure", lambda *_: result)
    words, message = SPOILT_BY[spoilt]
    assert run(tmp_path, words) == 2
    assert re.search(message, read_error_message(capsys))
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert "NaN" not in (tmp_path / "run" / "log.jsonl").read_text()


def test_evaluation_does_not_change_training(tmp_path):
    # evaluation sequences are longer than training sequences: dynamic RoPE changes frequencies
    words = [*dynamic(tmp_path), "--data", "retrieval:passkey:120", "--held-out", "1"]
    words += ["--validation", "retrieval:passkey:256"]
    for every in "10":
        assert run(tmp_path, [*words, "--eval-every", every], name=every) == 0
    assert read_step_field(tmp_path / "1", "loss") == read_step_field(tmp_path / "0", "loss")
    assert_same_tensors(load_saved_weights(tmp_path / "1"), load_saved_weights(tmp_path / "0"))


def test_run_starts_from_adapter_of_another_run(tmp_path, finished_run):
    adapter = ["--adapter", str(finished_run / "adapter")]

    def new_model(words):
        """Build the model of a new run whose --adapter is that of the finished run."""
        return train.build_model(
            lora.read([*SHORT_RUN_OPTIONS, *adapter, *words, "--out", "next"]), "cpu"
        )[0]

    model = new_model(["--length", "512"])
    actual = get_peft_model_state_dict(model, save_embedding_layers=False)
    saved = load_saved_weights(finished_run)
    assert_same_tensors(actual, saved)
    assert any(x.any() for name, x in actual.items() if "lora_B" in name)
    for words in (["--rank", "3"], ["--targets", "q_proj"]):
        with pytest.raises(UsageError, match="does not fit .*. Give the base .* rank, alpha"):
            new_model(words)
    # a run with another initial adapter cannot resume the first run
    assert run(tmp_path, adapter) == 0
    assert run(tmp_path, ["--adapter", str(tmp_path / "run" / "adapter")]) == 2
