"""Settings of fine-tuning: config files, command lines, and errors."""

import re
from pathlib import Path

import pytest
import yaml
from tiny import tiny_model
from transformers import LlamaConfig

from cab_hf import CabConfig
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.models import stretch_positions, with_lora
from cab_hf.finetune.objective import learning_rate
from cab_hf.finetune.settings import CHANGEABLE_SETTINGS, Settings, read

FOLDER = Path(__file__).parents[2] / "finetune"
DATA = ("text.jsonl",)


def make_settings(**fields):
    """Return `Settings` with the data source `DATA`, unless ``fields`` override it."""
    return Settings(**{"data": DATA, **fields})


@pytest.mark.parametrize("path", sorted((FOLDER / "configs").iterdir()), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path):
    actual = read(["--config", str(path)])
    # the configs llama3*.yaml are for eight GPUs, and all others for one
    assert actual.data and actual.count_micro_batches(8 if "llama3" in path.stem else 1) >= 1
    CabConfig.from_dict(actual.cab_config())
    fields = yaml.safe_load(path.read_text())
    assert actual.length == fields["length"] and actual.model == fields["model"]


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [
        *(("one_gpu", "NO", 1), ("ddp_8gpu", "MULTI_GPU", 8)),
        *(("fsdp2_8gpu", "FSDP", 8), ("cpu_2", "MULTI_GPU", 2)),
    ],
)
def test_accelerate_configs_are_valid(name, kind, processes):
    from accelerate.commands.config.config_args import load_config_from_file

    actual = load_config_from_file(str(FOLDER / "accelerate" / f"{name}.yaml"))
    assert (actual.distributed_type.value, actual.num_processes) == (kind, processes)
    # finetune.train enables autocast itself
    assert actual.mixed_precision == "no"


def test_calibration_sets_all_fields_and_assignments_override(tmp_path):
    config, file = CabConfig.published(((0.5, 0.9), (0.0, 0.9))), str(tmp_path / "own.json")
    config.save(file)
    assert make_settings(calibration=file).cab_config() == config.to_dict()
    fields = make_settings(calibration=file, cab=("min_length=64",)).cab_config()
    assert fields == {**config.to_dict(), "min_length": 64}


def test_field_unknown_to_calibration_raises(tmp_path):
    CabConfig.published().save(tmp_path / "own.json")
    file = str(tmp_path / "own.json")
    with pytest.raises(ValueError, match="no field 'coarsen'; its fields are query_block"):
        make_settings(calibration=file, cab=("coarsen=minmax",))
    with pytest.raises(ValueError, match="which predictor='frc' does not read"):
        make_settings(calibration=file, cab=("mass_threshold=0.1",))


def test_command_line_overrides_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: {a.txt: 0.75, b.jsonl: 0.25}\nlr: 1.0e-4\nlength: 1k\nrank: 8\n")
    words = ["--lr", "3e-4", "--checkpointing", "false", "--qlora", "--tile-tokens", "12"]
    actual = read(["--config", str(file), *words])
    assert (actual.tile_tokens, actual.offload_layers) == (12, None)
    assert (actual.lr, actual.rank, actual.checkpointing, actual.qlora) == (3e-4, 8, False, True)
    assert actual.parse_sources() == [("a.txt", 0.75), ("b.jsonl", 0.25)]
    assert actual.evaluated_lengths() == (512, 1024)


def test_existing_path_with_equals_sign_has_no_weight(tmp_path):
    """Do not split the path of an existing folder such as year=2024 into a path and a weight."""
    (tmp_path / "year=2024").mkdir()
    folder = str(tmp_path / "year=2024")
    data = (folder, f"{folder}=0.5", str(tmp_path / "year=2023"))
    expected = [(folder, 1.0), (folder, 0.5), (str(tmp_path / "year"), 2023.0)]
    assert Settings(data=data).parse_sources() == expected


def test_accumulation_steps_follow_tokens_per_step():
    fields = {"length": 1024, "micro_batch": 2}
    assert make_settings(**fields).count_micro_batches(4) == 1
    assert make_settings(**fields, tokens_per_step=2**16).count_micro_batches(4) == 8
    with pytest.raises(UsageError, match="tokens_per_step must be a multiple of 6144"):
        make_settings(**fields, tokens_per_step=2**16).count_micro_batches(3)
    # with context parallelism, ``cp`` processes share a sequence: 4 processes are 2 replicas
    with_cp = make_settings(length=1024, tokens_per_step=8192, cp=2)
    assert with_cp.count_micro_batches(4) == 4
    with pytest.raises(UsageError, match="tokens_per_step must be a multiple of 6144"):
        with_cp.count_micro_batches(12)


def test_identity_excludes_output_options():
    one, same = make_settings(), make_settings(out="elsewhere", save_every=1)
    assert (
        one.identity(2) == same.identity(2)
        and not set(CHANGEABLE_SETTINGS) & one.identity(2).keys()
    )
    for other in ({"lr": 1e-3}, {"steps": 300}, {"seed": 1}, {"cp": 2}, {"train": "all"}):
        assert make_settings(**other).identity(2) != one.identity(2)
    assert one.identity(1) != one.identity(2)


@pytest.mark.parametrize(
    # step 6 is halfway through the cosine: the rate is the mean of the peak 1.0 and the end 0.2
    ("step", "rate"),
    [(1, 0.5), (2, 1.0), (6, 0.6), (10, 0.2)],
)
def test_learning_rate_schedule_values(step, rate):
    schedule = make_settings(steps=10, warmup=2, lr=1.0, lr_end=0.2)
    assert learning_rate(step, schedule) == pytest.approx(rate)


# settings in YAML, cases separated by "|"; the error must name the last setting of its case
REFUSED = """
train: lora | train: all, qlora: true | train: all, dropout: 0.1 | train: all, rank: 8
train: all, alpha: 8.0 | train: all, targets: [q_proj] | train: all, adapter: a
data: [] | data: [a.txt=-1] | validation: [a=b] | steps: 0 | length: 1 | warmup: 200 | rank: 0
cp: 0 | cp: 2, attention: sdpa | cp: 4, length: 512 | alpha: 0.0 | dropout: 1.0 | lr: 0.0
lr_end: 1.1 | checkpointing: false, offload_layers: 3 | data_workers: 2 | tile_tokens: -1
link_gbs: 0.0 | dtype: float16 | rope: ntk | rope_factor: 2.0 | rope: yarn, rope_theta: 5.0e+5
passkey_lengths: [9999] | calibration: smollm3
"""


@pytest.mark.parametrize("row", [row.strip() for row in re.split(r"\||\n", REFUSED.strip())])
def test_invalid_settings_raise(row):
    fields = yaml.safe_load(f"{{{row}}}")
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    with pytest.raises(ValueError, match=rf"^{[*fields][-1]} "):
        make_settings(**fields)


POSITIONS = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
POSITIONS |= {"max_position_embeddings": 1000, "head_dim": 16}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "arguments", "config"),
    [
        ("length", {"rope": None, "length": 1001}, {}),
        ("rope_factor", {"length": 4000, "rope_factor": 2.0}, {}),
        ("rope_factor", {"rope_factor": 0.5}, {}),
        ("rope", {"length": 900}, {}),
        ("rope", {"length": 4000}, {"rope_parameters": SCALED}),
    ],
    ids=["too long", "factor too small", "factor below 1", "unneeded", "model has a scaling"],
)
def test_invalid_rope_settings_raise(name, arguments, config):
    arguments = {"rope": "yarn", "length": None, **arguments}
    with pytest.raises(ValueError, match=f"^{name} must be "):
        stretch_positions(LlamaConfig(**POSITIONS, **config), "a-model", **arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "is_tied"),
    [
        ("targets", {"targets": ["q_prj"]}, False),
        ("dropout", {"targets": ["lm_head"], "dropout": 0.1}, False),
        ("targets", {"targets": ["lm_head"]}, True),
    ],
    ids=["unknown target", "dropout of the head", "tied head"],
)
def test_invalid_adapter_settings_raise(name, arguments, is_tied):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        with_lora(tiny_model(tie_word_embeddings=is_tied), rank=2, alpha=4.0, **arguments)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lenght", "8"], "did you mean --length?"),
        (["--config", "FILE"], "unknown option 'targts'; did you mean targets?"),
        *((["--rank", "many"], "rank: "), (["--tile-tokens", "1.5"], "tile_tokens: ")),
        (["--lr", "inf"], "lr: "),
    ],
)
def test_invalid_command_line_exits_with_one_line(words, message, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("targts: [q_proj]\n")
    words = [str(file) if word == "FILE" else word for word in words]
    with pytest.raises(SystemExit) as raised:
        read(["--data", "a.txt", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert raised.value.code == 2 and line.startswith("finetune/lora.py: ") and message in line
