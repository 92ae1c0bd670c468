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
from tiny import SPARSE_CONFIG
from words import PROSE_TEXT, save_llama

from cab_hf.experiment.log import read_log
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import cost_model, lora, merge, train
from cab_hf.finetune.data import SequencePacker
from cab_hf.finetune.models import load_model
from cab_hf.finetune.objective import compute_learning_rate
from cab_hf.finetune.sources import make_source

# names of runs in which `PROGRAM_WITH_ERRORS` injects an error into one process
FAULTY_RUN_NAMES = ("spoilt", "spoilt-weights", *(f"spoilt-source-{x}" for x in "dv"))


def write_data_of_two_machines(folder, file_stem):
    """Write data of two machines: a file in folder 0 and a file of the same name in folder 1.

    Only the last documents of the files differ. Returns the path of the file in folder 0.
    """
    for rank in "01":
        (folder / rank).mkdir(exist_ok=True)
        lines = [json.dumps({"text": PROSE_TEXT * 4})] * 200 + [json.dumps({"text": rank * 200})]
        (folder / rank / f"{file_stem}.jsonl").write_text("\n".join(lines))
    return folder / "0" / f"{file_stem}.jsonl"


@pytest.mark.slow
def test_two_processes_resume_after_kill_and_stop(tmp_path):
    """Test all behaviour of two processes with few launches, because a launch is slow."""
    (script := tmp_path / "meddled.py").write_text(PROGRAM_WITH_ERRORS)
    command_by_run = {
        name: " ".join([*TRAIN_COMMAND[1:], "--out", str(tmp_path / name)])
        for name in ("whole", "stopped", "killed", *FAULTY_RUN_NAMES)
    }
    command_by_run["spoilt-source-d"] += f" --data {write_data_of_two_machines(tmp_path, 'data')}"
    command_by_run["spoilt-source-v"] += (
        f" --validation {write_data_of_two_machines(tmp_path, 'validation')}"
    )
    command_by_run["two"] = " ".join(
        [*SHORT_RUN_OPTIONS, "--dropout", "0", "--out", str(tmp_path / "two")]
    )
    # the second "stopped" run resumes after step 3, so that it does not stop again
    joined_commands = " / ".join(
        command_by_run[name] for name in ("whole", "two", *FAULTY_RUN_NAMES, "stopped", "stopped")
    )
    process = run_process([*LAUNCH_COMMAND, str(script), joined_commands])
    assert process.returncode == 0, process.stderr[-3000:]
    assert run_process([*LAUNCH_COMMAND, str(script), command_by_run["killed"]]).returncode != 0
    # the run was killed between the checkpoints of steps 2 and 4, so that it computes step 3 again
    assert [step for _, step, _ in read_losses(tmp_path / "killed")] == [1, 2]
    one_process_options = [
        "--tokens-per-step",
        "512",
        "--dropout",
        "0",
        "--out",
        str(tmp_path / "one"),
    ]
    merge_command = ["-m", "cab_hf.finetune.merge", str(tmp_path / "killed" / "adapter")]
    for command in (
        [*LAUNCH_COMMAND, *TRAIN_COMMAND, "--out", str(tmp_path / "killed")],
        ["python", *merge_command, str(tmp_path / "merged")],
        ["python", "finetune/lora.py", *SHORT_RUN_OPTIONS, *one_process_options],
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
    exit_statuses = [(tmp_path / f"meddled.py.{rank}").read_text() for rank in (0, 1)]
    assert exit_statuses == ["00222200"] * 2
    assert read_losses(tmp_path / "stopped") == read_losses(tmp_path / "whole")
    checkpoint_names = sorted(
        path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()
    )
    assert checkpoint_names == ["step-00000004", "step-00000006"]
    # two processes equal one process with two accumulation steps; no two steps have equal values
    for field in ("density", "grad_norm", "loss"):
        values_of_one_process, values_of_two_processes = (
            read_step_field(tmp_path / "one", field),
            read_step_field(tmp_path / "two", field),
        )
        assert values_of_one_process == pytest.approx(values_of_two_processes, rel=1e-5)
    assert len(set(values_of_one_process)) == len(values_of_one_process) == 4
    # both processes stop if one has a NaN gradient, and both name the parameter
    message = "step 3 has a gradient that is not finite, the first in base_model"
    assert process.stderr.count(message) == 2
    assert [step for _, step, _ in read_losses(tmp_path / "spoilt")] == [1, 2]
    (checkpoint,) = (tmp_path / "spoilt" / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000002"
    # if weights or data differ between processes, the run stops before the first step
    weight_fact = "weight base_model.model.model.layers.1.mlp.up_proj.weight"
    source_facts = [
        f"the content of source 1 of --{setting_name}" for setting_name in ("data", "validation")
    ]
    for fact in (weight_fact, *source_facts):
        message = f"{fact} must be equal in all processes, got another value in process 1"
        assert process.stderr.count(message) == 2
    assert not any((tmp_path / name).exists() for name in FAULTY_RUN_NAMES[1:])


def run_training(tmp_path, run_options=(), *, run_name="run", should_draw_curve=False):
    """Train in this process with `SHORT_RUN_OPTIONS` and ``run_options``; return the status."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        # drawing the loss curve takes as long as the training
        if not should_draw_curve:
            monkeypatch.setattr(train.curve, "draw_training_curves", lambda *_: None)
        return lora.main([*SHORT_RUN_OPTIONS, *run_options, "--out", str(tmp_path / run_name)])


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Train with `SHORT_RUN_OPTIONS`, and return the folder of the finished run."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_training(folder) == 0
    return folder / "run"


def read_error_message(capsys):
    """Return the error message that the command printed; there must be exactly one."""
    (error_line,) = [
        output_line
        for output_line in capsys.readouterr().err.splitlines()
        if output_line.startswith(lora.PROG)
    ]
    return error_line


def train_until(tmp_path, last_step, run_options=()):
    """Run a training that receives SIGTERM during step ``last_step``."""
    original_step = train.Run._run_step

    def stop_in_step(self, step, stop_request):
        if step == last_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original_step(self, step, stop_request)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(train.Run, "_run_step", stop_in_step)
        assert run_training(tmp_path, run_options) == 0
    assert len(read_step_field(tmp_path / "run", "loss")) == last_step


def test_run_with_validation_writes_files_and_complete_log(tmp_path):
    run_options = ["--held-out", "2", "--eval-every", "3", "--passkey-lengths", "192,256"]
    run_options += ["--validation", "retrieval:passkey:256"]
    assert run_training(tmp_path, run_options, should_draw_curve=True) == 0
    run_folder = tmp_path / "run"
    file_names = {path.name for path in run_folder.iterdir()}
    assert file_names == {"log.jsonl", "curve.png", "results.json", "adapter", "checkpoints"}
    assert (run_folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((run_folder / "results.json").read_text())
    assert results["processes"] == 1 and results["provenance"]["settings"]["length"] == 256
    assert results["evaluation"]["step"] == 4
    for record in read_log(run_folder / train.LOG_FILE)[1]:
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
    assert run_training(tmp_path, ["--adapter-dtype", "bfloat16"]) == 0
    unrounded_weights = load_saved_weights(finished_run)
    assert {tensor.dtype for tensor in unrounded_weights.values()} == {torch.float32}
    assert_same_tensors(
        load_saved_weights(tmp_path / "run"),
        {name: tensor.bfloat16() for name, tensor in unrounded_weights.items()},
    )
    shared_state = torch.load(next((tmp_path / "run").rglob("shared.pt")), weights_only=True)
    assert {tensor.dtype for tensor in shared_state["parameters"].values()} == {torch.float32}


def test_full_budget_run_matches_peft_loop(tmp_path):
    """Compare with a plain PEFT loop with SDPA, the same data and the same learning rates."""
    run_options = ["--cab", "mass_threshold=0", "--dropout", "0", "--data", "retrieval:keys:100"]
    run_options += ["--steps", "8", "--lr", "1e-2"]
    assert run_training(tmp_path, run_options) == 0
    settings = lora.read([*SHORT_RUN_OPTIONS, *run_options])
    torch.manual_seed(settings.seed)
    model, tokenizer = load_model("tiny", dtype="float32", attn_implementation="sdpa")
    lora_options = {"r": settings.rank, "lora_alpha": settings.alpha}
    model = get_peft_model(model, LoraConfig(**lora_options, target_modules=list(settings.targets)))
    trained_parameters = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained_parameters, betas=(0.9, settings.beta2), weight_decay=0.0)
    source_shares = [
        (make_source(source_name), share) for source_name, share in settings.parse_sources()
    ]
    packer, expected_losses = (
        SequencePacker(tokenizer, source_shares, settings.length, 0, hold_out_every=0),
        [],
    )
    for step in range(1, 9):
        optimizer.param_groups[0]["lr"] = compute_learning_rate(step, settings)
        batch = {tensor_name: tensor[None] for tensor_name, tensor in next(packer).items()}
        labels = batch.pop("labels").flatten()
        loss = torch.nn.functional.cross_entropy(model(**batch, use_cache=False).logits[0], labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained_parameters, settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        expected_losses.append(loss.item())
    assert read_step_field(tmp_path / "run", "density") == [1.0] * 8
    assert read_step_field(tmp_path / "run", "loss") == pytest.approx(expected_losses, rel=1e-4)
    assert expected_losses[-1] < 0.97 * expected_losses[0]


# by name: the options of two runs that must have equal losses
EQUIVALENT_OPTIONS = {
    "micro batches": (["--micro-batch", "2"], ["--tokens-per-step", "512"]),
    "tiles and offloaded checkpoints": ([], ["--tile-tokens", "48", "--offload-layers", "1"]),
}


@pytest.mark.parametrize(
    ("first_options", "second_options"), EQUIVALENT_OPTIONS.values(), ids=EQUIVALENT_OPTIONS
)
def test_memory_options_do_not_change_losses(tmp_path, first_options, second_options):
    assert run_training(tmp_path, ["--dropout", "0", *first_options], run_name="one") == 0
    assert run_training(tmp_path, ["--dropout", "0", *second_options], run_name="other") == 0
    for field in ("loss", "grad_norm"):
        values_of_first_run = read_step_field(tmp_path / "one", field)
        assert read_step_field(tmp_path / "other", field) == pytest.approx(
            values_of_first_run, rel=1e-5
        )


# by option: a file whose content a resumed run must compare with the content at its start
FILE_BY_OPTION = {
    "data": "data.jsonl",
    "validation": "validation.jsonl",
    "calibration": "calibration.json",
    "model": "model/model.safetensors",
}


def change_content(changed_file):
    """Return the content of ``changed_file`` with changed weights, words or mass threshold."""
    if changed_file.suffix == ".safetensors":
        return save({name: tensor + 0.1 for name, tensor in load_file(changed_file).items()})
    threshold_prefix = '"mass_threshold": 0.'
    return (
        changed_file.read_text()
        .replace("It", "He")
        .replace(threshold_prefix, f"{threshold_prefix}1")
        .encode()
    )


def test_changed_content_under_same_name_raises(tmp_path, capsys):
    save_llama(tmp_path / "model")
    SPARSE_CONFIG.save(tmp_path / "calibration.json")
    for file_stem, num_repetitions in (("data", 20), ("validation", 15)):
        (tmp_path / f"{file_stem}.jsonl").write_text(
            json.dumps({"text": PROSE_TEXT * num_repetitions}) + "\n"
        )
    run_options = ["--held-out", "1", "--passkeys", "0", "--steps", "3"]
    for option, file_name in FILE_BY_OPTION.items():
        run_options += [f"--{option}", str(tmp_path / file_name.partition("/")[0])]
    assert run_training(tmp_path, run_options) == 0
    log_bytes = (tmp_path / "run" / "log.jsonl").read_bytes()
    # new time stamps do not count as changed content
    for file in tmp_path.rglob("*.json*"):
        os.utime(file, (1, 1))
    assert run_training(tmp_path, run_options) == 0
    capsys.readouterr()
    for option, file_name in FILE_BY_OPTION.items():
        file = tmp_path / file_name
        original_content, changed_content = file.read_bytes(), change_content(file)
        assert changed_content != original_content
        file.write_bytes(changed_content)
        assert run_training(tmp_path, run_options) == 2
        field = f"{option}.{file}" if option in ("data", "validation") else option
        assert f"log.jsonl was made with sha256.{field} '" in read_error_message(capsys)
        assert (tmp_path / "run" / "log.jsonl").read_bytes() == log_bytes
        file.write_bytes(original_content)


@pytest.mark.parametrize("is_truncated", [False, True], ids=["log lost", "log truncated"])
def test_checkpoint_of_another_run_raises(tmp_path, capsys, finished_run, is_truncated):
    train_until(tmp_path, 2)
    run_folder = tmp_path / "run"
    log_text = (run_folder / train.LOG_FILE).read_text()
    (run_folder / train.LOG_FILE).unlink()
    if is_truncated:
        (run_folder / train.LOG_FILE).write_text(log_text[:30])
    assert run_training(tmp_path, ["--lr", "1e-3"]) == 2
    assert "checkpoints/step-00000002 was made with lr 0.002" in read_error_message(capsys)
    # with its original settings, the run continues
    assert run_training(tmp_path) == 0
    assert "log.jsonl has 0 of the 2 steps that were made before." in capsys.readouterr().out
    assert read_losses(run_folder) == read_losses(finished_run)[2:]


def test_finished_run_is_unchanged_and_cleaned_up(finished_run, capsys):
    half_removed_folder = finished_run / "checkpoints" / ".step-00000002.removed"
    log_bytes = (finished_run / train.LOG_FILE).read_bytes()
    half_removed_folder.mkdir()
    assert run_training(finished_run.parent) == 0 and not half_removed_folder.exists()
    # with other settings, the run does not continue
    assert run_training(finished_run.parent, ["--lr", "1e-3"]) == 2
    assert "log.jsonl was made with lr 0.002, this run has 0.001" in read_error_message(capsys)
    assert (finished_run / train.LOG_FILE).read_bytes() == log_bytes


# train all weights; --rank and --alpha reset the values of the config file to their defaults
TRAIN_ALL_OPTIONS = ["--train", "all", "--dropout", "0", "--rank", "16", "--alpha", "32"]
# sampled blocks and dropout use random generators, whose states a checkpoint must contain
RANDOM_STATE_OPTIONS = ["--cab", "sampled_one_in=3", "--dropout", "0.1", "--checkpointing", "true"]
# 4-bit weights with an evaluation after each step, which must not change the weights
QLORA_OPTIONS = [
    "--qlora",
    "--held-out",
    "1",
    "--eval-every",
    "1",
    "--validation",
    "retrieval:passkey:256",
]


def make_dynamic_rope_options(folder):
    """Return options of a run with dynamic RoPE whose first sequence is longer than later ones."""
    config_file = save_llama(folder / "model") / "config.json"
    config_file.write_text(
        json.dumps({**json.loads(config_file.read_text()), "max_position_embeddings": 100})
    )
    model_options = ["--model", str(config_file.parent), "--rope", "dynamic", "--attention", "sdpa"]
    return [*model_options, "--data", "retrieval:passkey:256=1,retrieval:passkey:120=40"]


@pytest.mark.parametrize(
    ("make_options", "last_step"),
    [
        *((lambda _: [], 2), (lambda _: RANDOM_STATE_OPTIONS, 1), (make_dynamic_rope_options, 2)),
        (lambda folder: [*TRAIN_ALL_OPTIONS, "--model", str(save_llama(folder / "base"))], 2),
        (lambda _: [*TRAIN_ALL_OPTIONS, "--dtype", "bfloat16"], 2),
        (lambda _: QLORA_OPTIONS, 2),
    ],
    ids=["adapter", "sampled blocks", "dynamic", "all weights", "products in bfloat16", "nf4"],
)
def test_stopped_run_resumes_bit_identically(
    tmp_path, capsys, finished_run, make_options, last_step
):
    run_options = make_options(tmp_path)
    assert not run_options or run_training(tmp_path, run_options, run_name="whole") == 0
    capsys.readouterr()
    train_until(tmp_path, last_step, run_options)
    message = f"stopped at step {last_step} on request; the same command continues.\n"
    assert capsys.readouterr().out == message
    assert run_training(tmp_path, run_options) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole" if run_options else finished_run)


def test_adapter_of_4_bit_weights_merges_into_base(tmp_path, capsys):
    assert run_training(tmp_path, ["--qlora"]) == 0
    assert merge.main([str(tmp_path / "run" / "adapter"), str(tmp_path / "merged")]) == 0
    assert "merged; the largest difference of a logit is" in capsys.readouterr().out
    merged_model, _ = load_model(str(tmp_path / "merged"), dtype="float32")
    assert not any(hasattr(weight, "quant_state") for weight in merged_model.parameters())


def test_full_training_saves_model_that_loads_identically(tmp_path, monkeypatch):
    finished_runs, losses_by_dtype, original_write_results = [], {}, train.Run._write_results
    monkeypatch.setattr(
        train.Run,
        "_write_results",
        lambda self, log: (finished_runs.append(self), original_write_results(self, log)),
    )
    run_options = [
        *TRAIN_ALL_OPTIONS,
        "--model",
        str(save_llama(tmp_path / "base")),
        "--steps",
        "12",
        "--lr",
        "1e-2",
    ]
    base_weights, token_ids = (
        load_file(tmp_path / "base" / "model.safetensors"),
        torch.arange(3, 40)[None],
    )
    for dtype in ("float32", "bfloat16"):
        assert run_training(tmp_path, [*run_options, "--dtype", dtype], run_name=dtype) == 0
        saved_weights, trained_model = (
            load_saved_weights(tmp_path / dtype),
            finished_runs.pop().model.eval(),
        )
        assert base_weights.keys() == saved_weights.keys()
        assert not any(
            torch.equal(weight, base_weights[name]) for name, weight in saved_weights.items()
        )
        loaded_model, _ = load_model(str(tmp_path / dtype / "model"), dtype="float32")
        assert {parameter.dtype for parameter in trained_model.parameters()} == {torch.float32}
        with torch.no_grad():
            assert torch.equal(loaded_model(token_ids).logits, trained_model(token_ids).logits)
        losses_by_dtype[dtype] = read_step_field(tmp_path / dtype, "loss")
    float32_losses, bfloat16_losses = losses_by_dtype.values()
    assert float32_losses[-1] < 0.6 * float32_losses[0]
    # adapter products in bfloat16 instead of float32 change the losses slightly
    assert bfloat16_losses != float32_losses and bfloat16_losses == pytest.approx(
        float32_losses, rel=0.05
    )


# cases "OPTIONS > PART OF THE ERROR MESSAGE", separated by ";" or line ends
REFUSED_OPTION_CASES = """
--tokens-per-step 300 > tokens_per_step ; --length 8192 > length must be at most 4096
--targets q_prj > targets must be names of linear layers ; --passkey-lengths 64 > passkey_lengths
--cp 2 --length 512 > cp must divide the 1 processes ; --data gone.txt > gone.txt
--data gone.txt --dry-run > gone.txt ; --model /nowhere > '/nowhere' does not exist
--attention falsh > or give another attn_implementation. ; --attention falsh --dry-run > attention
--cab mas=1 > mas ; --cab redundancy=3 --attention sdpa > redundancy must be in [0, 1], got 3
--dry-run --gpu-gib 1e-4 > got 256 ; --adapter nowhere > adapter must be a folder
"""


@pytest.mark.parametrize("option_case", re.split(r" ; |\n", REFUSED_OPTION_CASES.strip()))
def test_unsupported_settings_exit_with_one_line(tmp_path, capsys, option_case):
    option_text, _, message = option_case.partition(" > ")
    assert run_training(tmp_path, option_text.split()) == 2
    assert message in read_error_message(capsys)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_foreign_output_folder_raises(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    assert run_training(tmp_path) == 2 and "out must be" in read_error_message(capsys)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


# by name: (injected error, part of the printed message; None: the error propagates)
INJECTED_ERRORS = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "--micro-batch"),
    "disk": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
    "bug with files": (OSError(errno.EBADF, os.strerror(errno.EBADF)), None),
}


@pytest.mark.parametrize(("error", "message"), INJECTED_ERRORS.values(), ids=INJECTED_ERRORS)
def test_out_of_memory_exits_with_one_line(tmp_path, monkeypatch, capsys, error, message):
    def raise_error(*_):
        raise error

    monkeypatch.setattr(train.Run, "_accumulate_gradients", raise_error)
    if message is None:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            run_training(tmp_path)
        return
    assert run_training(tmp_path) == 2
    assert message in read_error_message(capsys)


def test_dry_run_prints_estimates(tmp_path, capsys):
    model = save_llama(tmp_path / "model")
    run_options = [
        "--model",
        str(model),
        "--length",
        "1024",
        "--tokens-per-step",
        "4096",
        "--dry-run",
    ]
    assert run_training(tmp_path, run_options) == 0
    report_text = capsys.readouterr().out
    settings = lora.read([*SHORT_RUN_OPTIONS, *run_options])
    model, _ = train.build_model(settings, torch.device("cpu"))
    cost = cost_model.Cost.from_model(model)
    assert (
        f"parameters: {cost.num_parameters:,}, trained: {cost.num_trained_parameters:,}"
        in report_text
    )
    num_pairs = 4 * 1024 * 1025 // 2
    step_flops = cost.count_product_flops(4096) + sum(cost.count_attention_flops([num_pairs] * 2))
    assert (
        f"{step_flops:.3e}" in report_text
        and "fits into" in report_text
        and '"lr": 0.002' in report_text
    )
    assert not (tmp_path / "run").exists()


WEIGHT_NAME_PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
# by part of the run that becomes NaN: (options, pattern of the message)
NAN_CASES = {
    "base": ([], "step 1 has a weight that is not finite, .* in base"),
    "rate": (["--lr", "1e25"], f"step 2 has a gradient .* in {WEIGHT_NAME_PREFIX}A"),
    "state": (
        ["--save-every", "1"],
        f"step 1 has values that are not finite in {WEIGHT_NAME_PREFIX}B",
    ),
    "evaluation": (["--eval-every", "1"], "log.jsonl must contain finite numbers only"),
}


@pytest.mark.parametrize("spoilt_part", NAN_CASES)
def test_nan_ends_run_before_saving(tmp_path, monkeypatch, capsys, spoilt_part):
    original_build, original_step, nan = train.build_model, torch.optim.AdamW.step, float("nan")

    def build_spoilt_model(settings, device):
        model, tokenizer = original_build(settings, device)
        model.get_base_model().model.layers[1].mlp.up_proj.weight.data[3, 3] = nan
        return model, tokenizer

    def step_and_spoil(optimizer, closure=None):
        original_step(optimizer, closure)
        optimizer.param_groups[0]["params"][1].data[0, 0] = nan

    if spoilt_part == "base":
        monkeypatch.setattr(train, "build_model", build_spoilt_model)
    if spoilt_part == "state":
        monkeypatch.setattr(torch.optim.AdamW, "step", step_and_spoil)
    if spoilt_part == "evaluation":
        nan_evaluation = {"held_out_loss": nan, "passkey": {}}
        monkeypatch.setattr(train.Validation, "evaluate", lambda *_: nan_evaluation)
    run_options, message = NAN_CASES[spoilt_part]
    assert run_training(tmp_path, run_options) == 2
    assert re.search(message, read_error_message(capsys))
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert "NaN" not in (tmp_path / "run" / "log.jsonl").read_text()


def test_evaluation_does_not_change_training(tmp_path):
    # evaluation sequences are longer than training sequences: dynamic RoPE changes frequencies
    run_options = [
        *make_dynamic_rope_options(tmp_path),
        "--data",
        "retrieval:passkey:120",
        "--held-out",
        "1",
    ]
    run_options += ["--validation", "retrieval:passkey:256"]
    for eval_every in "10":
        assert (
            run_training(tmp_path, [*run_options, "--eval-every", eval_every], run_name=eval_every)
            == 0
        )
    assert read_step_field(tmp_path / "1", "loss") == read_step_field(tmp_path / "0", "loss")
    assert_same_tensors(load_saved_weights(tmp_path / "1"), load_saved_weights(tmp_path / "0"))


def test_run_starts_from_adapter_of_another_run(tmp_path, finished_run):
    adapter_options = ["--adapter", str(finished_run / "adapter")]

    def build_new_model(run_options):
        """Build the model of a new run whose --adapter is that of the finished run."""
        return train.build_model(
            lora.read([*SHORT_RUN_OPTIONS, *adapter_options, *run_options, "--out", "next"]),
            "cpu",
        )[0]

    model = build_new_model(["--length", "512"])
    loaded_weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    saved_weights = load_saved_weights(finished_run)
    assert_same_tensors(loaded_weights, saved_weights)
    assert any(
        tensor.any() for tensor_name, tensor in loaded_weights.items() if "lora_B" in tensor_name
    )
    for run_options in (["--rank", "3"], ["--targets", "q_proj"]):
        with pytest.raises(UsageError, match="does not fit .*. Give the base .* rank, alpha"):
            build_new_model(run_options)
    # a run with another initial adapter cannot resume the first run
    assert run_training(tmp_path, adapter_options) == 0
    assert run_training(tmp_path, ["--adapter", str(tmp_path / "run" / "adapter")]) == 2
