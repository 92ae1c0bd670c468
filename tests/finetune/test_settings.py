"""Settings of fine-tuning: config files, command lines, and errors."""

import re
from pathlib import Path

import pytest
import yaml
from tiny import make_tiny_model
from transformers import LlamaConfig

from cab_hf import CabConfig
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.models import stretch_positions, with_lora
from cab_hf.finetune.objective import compute_learning_rate
from cab_hf.finetune.settings import CHANGEABLE_SETTINGS, Settings, read

FINETUNE_FOLDER = Path(__file__).parents[2] / "finetune"
DATA_SOURCES = ("text.jsonl",)


def make_settings(**other_settings):
    """Return `Settings` with `DATA_SOURCES` as data, unless ``other_settings`` override it."""
    return Settings(**{"data": DATA_SOURCES, **other_settings})


@pytest.mark.parametrize(
    "config_file",
    sorted((FINETUNE_FOLDER / "configs").iterdir()),
    ids=lambda config_file: config_file.stem,
)
def test_shipped_configs_are_valid(config_file):
    settings = read(["--config", str(config_file)])
    # the configs llama3*.yaml are for eight GPUs, and all others for one
    assert (
        settings.data
        and settings.count_micro_batches(8 if "llama3" in config_file.stem else 1) >= 1
    )
    CabConfig.from_dict(settings.get_cab_fields())
    yaml_fields = yaml.safe_load(config_file.read_text())
    assert settings.length == yaml_fields["length"] and settings.model == yaml_fields["model"]


@pytest.mark.parametrize(
    ("config_name", "distributed_type", "num_processes"),
    [
        *(("one_gpu", "NO", 1), ("ddp_8gpu", "MULTI_GPU", 8)),
        *(("fsdp2_8gpu", "FSDP", 8), ("cpu_2", "MULTI_GPU", 2)),
    ],
)
def test_accelerate_configs_are_valid(config_name, distributed_type, num_processes):
    from accelerate.commands.config.config_args import load_config_from_file

    accelerate_config = load_config_from_file(
        str(FINETUNE_FOLDER / "accelerate" / f"{config_name}.yaml")
    )
    assert (accelerate_config.distributed_type.value, accelerate_config.num_processes) == (
        distributed_type,
        num_processes,
    )
    # finetune.train enables autocast itself
    assert accelerate_config.mixed_precision == "no"


def test_calibration_sets_all_fields_and_assignments_override(tmp_path):
    calibrated_config, calibration_file = (
        CabConfig.published(((0.5, 0.9), (0.0, 0.9))),
        str(tmp_path / "own.json"),
    )
    calibrated_config.save(calibration_file)
    assert (
        make_settings(calibration=calibration_file).get_cab_fields() == calibrated_config.to_dict()
    )
    cab_fields = make_settings(
        calibration=calibration_file, cab=("min_length=64",)
    ).get_cab_fields()
    assert cab_fields == {**calibrated_config.to_dict(), "min_length": 64}


def test_field_unknown_to_calibration_raises(tmp_path):
    CabConfig.published().save(tmp_path / "own.json")
    calibration_file = str(tmp_path / "own.json")
    with pytest.raises(ValueError, match="no field 'coarsen'; its fields are query_block"):
        make_settings(calibration=calibration_file, cab=("coarsen=minmax",))
    with pytest.raises(ValueError, match="which predictor='frc' does not read"):
        make_settings(calibration=calibration_file, cab=("mass_threshold=0.1",))


def test_command_line_overrides_file(tmp_path):
    config_file = tmp_path / "run.yaml"
    config_file.write_text("data: {a.txt: 0.75, b.jsonl: 0.25}\nlr: 1.0e-4\nlength: 1k\nrank: 8\n")
    arguments = ["--lr", "3e-4", "--checkpointing", "false", "--qlora", "--tile-tokens", "12"]
    settings = read(["--config", str(config_file), *arguments])
    assert (settings.tile_tokens, settings.offload_layers) == (12, None)
    assert (settings.lr, settings.rank, settings.checkpointing, settings.qlora) == (
        3e-4,
        8,
        False,
        True,
    )
    assert settings.parse_sources() == [("a.txt", 0.75), ("b.jsonl", 0.25)]
    assert settings.get_passkey_lengths() == (512, 1024)


def test_existing_path_with_equals_sign_has_no_weight(tmp_path):
    """Do not split the path of an existing folder such as year=2024 into a path and a weight."""
    (tmp_path / "year=2024").mkdir()
    folder = str(tmp_path / "year=2024")
    data_sources = (folder, f"{folder}=0.5", str(tmp_path / "year=2023"))
    expected_weights = [(folder, 1.0), (folder, 0.5), (str(tmp_path / "year"), 2023.0)]
    assert Settings(data=data_sources).parse_sources() == expected_weights


def test_accumulation_steps_follow_tokens_per_step():
    batch_settings = {"length": 1024, "micro_batch": 2}
    assert make_settings(**batch_settings).count_micro_batches(4) == 1
    assert make_settings(**batch_settings, tokens_per_step=2**16).count_micro_batches(4) == 8
    with pytest.raises(UsageError, match="tokens_per_step must be a multiple of 6144"):
        make_settings(**batch_settings, tokens_per_step=2**16).count_micro_batches(3)
    # with context parallelism, ``cp`` processes share a sequence: 4 processes are 2 replicas
    settings_with_cp = make_settings(length=1024, tokens_per_step=8192, cp=2)
    assert settings_with_cp.count_micro_batches(4) == 4
    with pytest.raises(UsageError, match="tokens_per_step must be a multiple of 6144"):
        settings_with_cp.count_micro_batches(12)


def test_identity_excludes_output_options():
    settings, settings_with_other_outputs = (
        make_settings(),
        make_settings(out="elsewhere", save_every=1),
    )
    assert (
        settings.get_identity(2) == settings_with_other_outputs.get_identity(2)
        and not set(CHANGEABLE_SETTINGS) & settings.get_identity(2).keys()
    )
    for changed_setting in ({"lr": 1e-3}, {"steps": 300}, {"seed": 1}, {"cp": 2}, {"train": "all"}):
        assert make_settings(**changed_setting).get_identity(2) != settings.get_identity(2)
    assert settings.get_identity(1) != settings.get_identity(2)


@pytest.mark.parametrize(
    # step 6 is halfway through the cosine: the rate is the mean of the peak 1.0 and the end 0.2
    ("step", "expected_rate"),
    [(1, 0.5), (2, 1.0), (6, 0.6), (10, 0.2)],
)
def test_learning_rate_schedule_values(step, expected_rate):
    settings = make_settings(steps=10, warmup=2, lr=1.0, lr_end=0.2)
    assert compute_learning_rate(step, settings) == pytest.approx(expected_rate)


# settings in YAML, cases separated by "|"; the error must name the last setting of its case
REFUSED_SETTINGS = """
train: lora | train: all, qlora: true | train: all, dropout: 0.1 | train: all, rank: 8
train: all, alpha: 8.0 | train: all, targets: [q_proj] | train: all, adapter: a
data: [] | data: [a.txt=-1] | validation: [a=b] | steps: 0 | length: 1 | warmup: 200 | rank: 0
cp: 0 | cp: 2, attention: sdpa | cp: 4, length: 512 | alpha: 0.0 | dropout: 1.0 | lr: 0.0
lr_end: 1.1 | checkpointing: false, offload_layers: 3 | data_workers: 2 | tile_tokens: -1
link_gbs: 0.0 | dtype: float16 | rope: ntk | rope_factor: 2.0 | rope: yarn, rope_theta: 5.0e+5
passkey_lengths: [9999] | calibration: smollm3
"""


@pytest.mark.parametrize(
    "yaml_row", [yaml_row.strip() for yaml_row in re.split(r"\||\n", REFUSED_SETTINGS.strip())]
)
def test_invalid_settings_raise(yaml_row):
    invalid_settings = yaml.safe_load(f"{{{yaml_row}}}")
    invalid_settings = {
        setting: tuple(setting_value) if isinstance(setting_value, list) else setting_value
        for setting, setting_value in invalid_settings.items()
    }
    with pytest.raises(ValueError, match=rf"^{[*invalid_settings][-1]} "):
        make_settings(**invalid_settings)


CONFIG_FIELDS = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
CONFIG_FIELDS |= {"max_position_embeddings": 1000, "head_dim": 16}
SCALED_ROPE_PARAMETERS = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("argument_name", "rope_arguments", "config_fields"),
    [
        ("length", {"rope": None, "length": 1001}, {}),
        ("rope_factor", {"length": 4000, "rope_factor": 2.0}, {}),
        ("rope_factor", {"rope_factor": 0.5}, {}),
        ("rope", {"length": 900}, {}),
        ("rope", {"length": 4000}, {"rope_parameters": SCALED_ROPE_PARAMETERS}),
    ],
    ids=["too long", "factor too small", "factor below 1", "unneeded", "model has a scaling"],
)
def test_invalid_rope_settings_raise(argument_name, rope_arguments, config_fields):
    rope_arguments = {"rope": "yarn", "length": None, **rope_arguments}
    with pytest.raises(ValueError, match=f"^{argument_name} must be "):
        stretch_positions(
            LlamaConfig(**CONFIG_FIELDS, **config_fields), "a-model", **rope_arguments
        )


@pytest.mark.parametrize(
    ("argument_name", "lora_arguments", "is_tied"),
    [
        ("targets", {"targets": ["q_prj"]}, False),
        ("dropout", {"targets": ["lm_head"], "dropout": 0.1}, False),
        ("targets", {"targets": ["lm_head"]}, True),
    ],
    ids=["unknown target", "dropout of the head", "tied head"],
)
def test_invalid_adapter_settings_raise(argument_name, lora_arguments, is_tied):
    with pytest.raises(ValueError, match=f"^{argument_name} must be "):
        with_lora(make_tiny_model(tie_word_embeddings=is_tied), rank=2, alpha=4.0, **lora_arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lenght", "8"], "did you mean --length?"),
        (["--config", "FILE"], "unknown option 'targts'; did you mean targets?"),
        *((["--rank", "many"], "rank: "), (["--tile-tokens", "1.5"], "tile_tokens: ")),
        (["--lr", "inf"], "lr: "),
    ],
)
def test_invalid_command_line_exits_with_one_line(arguments, message, tmp_path, capsys):
    config_file = tmp_path / "run.yaml"
    config_file.write_text("targts: [q_proj]\n")
    arguments = [str(config_file) if argument == "FILE" else argument for argument in arguments]
    with pytest.raises(SystemExit) as error_info:
        read(["--data", "a.txt", *arguments])
    (error_line,) = capsys.readouterr().err.splitlines()
    assert (
        error_info.value.code == 2
        and error_line.startswith("finetune/lora.py: ")
        and message in error_line
    )
