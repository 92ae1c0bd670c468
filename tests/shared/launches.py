"""Run commands in new processes, and compare the results of training runs."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from cab_hf.experiment.log import read_log
from cab_hf.finetune import train

ROOT = Path(__file__).parents[2]
# commands as in finetune/README.md
LAUNCH_COMMAND = ["accelerate", "launch", "--config_file", "finetune/accelerate/cpu_2.yaml"]
TRAIN_COMMAND = ["finetune/lora.py", "--config", "finetune/configs/tiny_cpu.yaml"]
# options of a run of four short steps on the CPU
SHORT_RUN_OPTIONS = [
    *("--config", str(ROOT / "finetune" / "configs" / "tiny_cpu.yaml"), "--cpu"),
    *("--data", "retrieval:passkey:256", "--length", "256", "--steps", "4", "--save-every", "9"),
    *("--eval-every", "0", "--held-out", "0", "--passkey-lengths", "256"),
]
# program that runs several trainings one after the other in the same processes. It injects an
# error into a run whose output folder has one of the names in the program
PROGRAM_WITH_ERRORS = """
import os, signal, sys
from dataclasses import replace
from cab_hf.finetune import lora, train

rank, original_step = int(os.environ["RANK"]), train.Run._run_step

def step_with_error(run, step, stop_request):
    # run.num_finished_steps is 0 unless the run was resumed
    if run.out.name == "killed" and step == 3 and not run.num_finished_steps:
        os.kill(os.getpid(), signal.SIGKILL)
    if run.out.name == "stopped" and step == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if run.out.name == "spoilt" and step == 3 and rank == 1:
        run._clip_gradients = lambda: write_nan(run.model)
    return original_step(run, step, stop_request)

def write_nan(model):
    # called in one process after gradients were averaged
    parameter = next(weight for weight in model.parameters() if weight.requires_grad)
    parameter.grad[0, 0] = float("nan")
    return float("nan")

train.Run._run_step = step_with_error
original_build, original_open_data = train.build_model, train.open_data

def build_with_error(settings, device):
    model, tokenizer = original_build(settings, device)
    if settings.out.endswith("spoilt-weights") and rank == 1:
        model.get_base_model().model.layers[1].mlp.up_proj.weight.data[3, 3] += 1e-3
    return model, tokenizer

def open_other_data(settings, **kwargs):
    if "spoilt-source" in settings.out and rank == 1:
        # rank 1 reads another file with the same name
        other_sources = {
            setting: [source.replace("/0/", "/1/") for source in getattr(settings, setting)]
            for setting in ("data", "validation")
        }
        settings = replace(settings, **other_sources)
    return original_open_data(settings=settings, **kwargs)

train.build_model, train.open_data = build_with_error, open_other_data
# keep the process group for the next run
train.Accelerator.end_training = lambda self: None
for command in sys.argv[1].split(" / "):
    status = lora.main(command.split())
    # a file per rank, because printed text of two processes gets mixed
    with open(f"{sys.argv[0]}.{rank}", "a") as file:
        file.write(str(status))
    if status and "spoilt" not in command:
        raise SystemExit(status)
"""


def run_process(command_line):
    """Run a command and return the finished process.

    ``command_line`` is a list that starts with "python", or with "accelerate" and "launch".
    """
    launcher_arguments = (
        ["-m", "accelerate.commands.launch"] if command_line[0] == "accelerate" else []
    )
    command = [sys.executable, *launcher_arguments, *command_line[2 if launcher_arguments else 1 :]]
    # run as users do, without Triton's interpreter, which is slow
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def read_losses(run_folder):
    """Return a list of (kind, step, loss) of all log records of the run in ``run_folder``."""
    _, records = read_log(run_folder / train.LOG_FILE)
    return [
        (record["kind"], record["step"], record.get("loss", record.get("held_out_loss")))
        for record in records
    ]


def read_step_field(run_folder, field_name):
    """Return a list with field ``field_name`` of all step records in the log of a run."""
    _, records = read_log(run_folder / train.LOG_FILE)
    return [record[field_name] for record in records if record["kind"] == "step"]


def load_saved_weights(run_folder):
    """Return the saved tensors of a run by name: of its adapter, or of its model."""
    (weights_file,) = [
        *run_folder.glob("adapter/*.safetensors"),
        *run_folder.glob("model/*.safetensors"),
    ]
    return load_file(weights_file)


def assert_same_tensors(actual, expected):
    """Assert that two dicts of tensors are bit-identical."""
    assert actual.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in actual.items())


def assert_same_run(first_run_folder, second_run_folder):
    """Assert that losses, gradient norms, densities and weights of two runs are bit-identical."""
    assert read_losses(first_run_folder) == read_losses(second_run_folder)
    for field_name in ("grad_norm", "density"):
        assert read_step_field(first_run_folder, field_name) == read_step_field(
            second_run_folder, field_name
        )
    assert_same_tensors(load_saved_weights(first_run_folder), load_saved_weights(second_run_folder))
