"""What a fine-tuning run is told: files, words, and what is refused."""

from pathlib import Path

import pytest
import yaml

from cab_hf import CabConfig
from cab_hf.finetune.objective import learning_rate
from cab_hf.finetune.settings import ADAPTER, ALL, FREE, Settings, read
from cab_hf.runs.log import Log, LogError
from cab_hf.runs.settings import UsageError

FOLDER = Path(__file__).parents[2] / "finetune"
DATA = ("text.jsonl",)


def settings(**given):
    return Settings(**{"data": DATA, **given})


@pytest.mark.parametrize("path", sorted((FOLDER / "configs").iterdir()), ids=lambda path: path.stem)
def test_every_config_that_ships_is_one(path):
    actual = read(["--config", str(path)])
    assert actual.data and actual.accumulation(1) >= 1
    CabConfig.from_dict(actual.cab_config())
    given = yaml.safe_load(path.read_text())
    assert actual.length == given["length"] and actual.model == given["model"]


def test_configs_for_eight_gpus_divide_their_steps_among_them():
    for path in (FOLDER / "configs").glob("llama3*.yaml"):
        read(["--config", str(path)]).accumulation(8)


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [
        pytest.param("one_gpu", "NO", 1, id="one GPU"),
        pytest.param("ddp_8gpu", "MULTI_GPU", 8, id="DDP"),
        pytest.param("fsdp2_8gpu", "FSDP", 8, id="FSDP2"),
        pytest.param("cpu_2", "MULTI_GPU", 2, id="CPU"),
    ],
)
def test_accelerate_reads_its_configs(name, kind, processes):
    from accelerate.commands.config.config_args import load_config_from_file

    actual = load_config_from_file(str(FOLDER / "accelerate" / f"{name}.yaml"))
    assert (actual.distributed_type.value, actual.num_processes) == (kind, processes)
    # autocast is the run's own business
    assert actual.mixed_precision == "no"


def test_a_calibration_is_a_whole_config_and_fields_change_it(tmp_path):
    own, file = CabConfig.published(((0.5, 0.9), (0.0, 0.9))), str(tmp_path / "own.json")
    own.save(file)
    assert settings(calibration=file).cab_config() == own.to_dict()
    given = settings(calibration=file, cab=("min_length=64",)).cab_config()
    assert given == {**own.to_dict(), "min_length": 64}
    with pytest.raises(ValueError, match="calibration 'smollm3' is no file; give one that"):
        settings(calibration="smollm3")


def test_typed_words_win_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: {a.txt: 0.75, b.jsonl: 0.25}\nlr: 1.0e-4\nlength: 512\nrank: 8\n")
    actual = read(["--config", str(file), "--lr", "3e-4", "--checkpointing", "false", "--qlora"])
    assert (actual.lr, actual.rank, actual.checkpointing, actual.qlora) == (3e-4, 8, False, True)
    assert actual.sources() == [("a.txt", 0.75), ("b.jsonl", 0.25)]
    assert actual.evaluated_lengths() == (256, 512)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--lenght", "8"], "'--lenght'; did you mean --length?", id="typed"),
        pytest.param(["--config", "FILE"], "sets 'targts'; did you mean targets?", id="in a file"),
        pytest.param(["--config", "gone.yaml"], "config must be a YAML file; gone", id="no file"),
        pytest.param(
            ["--rope", "ntk"], "rope is 'ntk'; it must be one of none, linear", id="choice"
        ),
        pytest.param(["--rank", "many"], "rank: ", id="no number"),
        pytest.param(
            ["--tile-tokens", "1.5"],
            "tile_tokens: it must be auto or a whole number; got 1.5",
            id="no number or auto",
        ),
        *(
            pytest.param([name, number], f"must be a finite number; got {number}", id=name)
            for name, number in (
                *(("--lr", "inf"), ("--weight-decay", "inf"), ("--alpha", "inf")),
                *(("--clip", "nan"), ("--rope-factor", "inf"), ("--peak-tflops", "inf")),
            )
        ),
    ],
)
def test_a_command_line_is_refused_in_one_line(words, message, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("targts: [q_proj]\n")
    words = [str(file) if word == "FILE" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        read(["--data", "a.txt", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("finetune/lora.py: ") and message in line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            {"train": "lora"}, "train is 'lora'; it must be one of adapter, all", id="train"
        ),
        pytest.param({"train": "all", "qlora": True}, "off with train=all", id="4 bits"),
        pytest.param({"train": "all", "dropout": 0.1}, "0 with train=all", id="dropout of LoRA"),
        pytest.param(
            {"train": "all", "rank": 8},
            "rank is 8; it must be left out, or 16, with train=all: it is LoRA's",
            id="rank of LoRA",
        ),
        pytest.param({"train": "all", "alpha": 8.0}, "or 32.0, with train=all", id="alpha of LoRA"),
        pytest.param(
            {"train": "all", "targets": ("q_proj",)},
            "left out, or q_proj,k_proj,v_proj,o_proj, with train=all",
            id="targets of LoRA",
        ),
        pytest.param({"data": ()}, r"data is \(\); it must be at least one source", id="no data"),
        pytest.param(
            {"data": ("a.txt=-1",)},
            r"data is 'a\.txt=\-1'; it must be NAME or NAME=WEIGHT",
            id="weight",
        ),
        pytest.param(
            {"validation": ("a=b",)}, "validation is 'a=b'; it must be NAME or", id="no weight"
        ),
        pytest.param({"steps": 0}, "steps is 0; it must be a whole number from 1 on", id="steps"),
        pytest.param(
            {"length": 1}, "length is 1; it must be a whole number from 2 on", id="length"
        ),
        pytest.param({"warmup": 200}, "warmup is 200; it must be less than steps=200", id="warmup"),
        pytest.param({"rank": 0}, "rank is 0; it must be a whole number from 1 on", id="rank"),
        pytest.param({"alpha": 0.0}, r"alpha is 0\.0; it must be a number above 0", id="alpha"),
        pytest.param({"dropout": 1.0}, r"dropout is 1\.0; it must be in .0, 1.", id="dropout"),
        pytest.param({"lr": 0.0}, r"lr is 0\.0; it must be a number above 0", id="lr"),
        pytest.param(
            {"offload_layers": 3, "checkpointing": False},
            "offload_layers is 3; it must be 0 without checkpointing",
            id="nothing to offload",
        ),
        pytest.param({"data_workers": 2}, "data_workers is 2; it must be 0 or 1", id="workers"),
        pytest.param({"tile_tokens": -1}, r"tile_tokens is -1; it must be auto, or 0", id="tile"),
        pytest.param(
            {"link_gbs": 0.0}, r"link_gbs is 0\.0; it must be a number above 0", id="link"
        ),
        pytest.param(
            {"dtype": "float16"},
            "dtype is 'float16'; it must be one of bfloat16, float32",
            id="dtype",
        ),
        pytest.param(
            {"trackers": ("mlflow",)},
            r"trackers is \['mlflow'\]; it must be some of tensorb",
            id="tracker",
        ),
        pytest.param(
            {"passkey_lengths": (9999,)},
            r"passkey_lengths is \(9999,\); it must be at most",
            id="keys",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        settings(**given)


def test_lengths_may_be_told_in_thousands():
    actual = read(["--data", "a.txt", "--length", "32k", "--passkey-lengths", "1k,2k"])
    assert (actual.length, actual.passkey_lengths) == (32_768, (1024, 2048))


def test_a_source_that_is_there_by_all_of_its_name_has_no_weight(tmp_path):
    """Folders of partitions are called so."""
    (tmp_path / "year=2024").mkdir()
    named = str(tmp_path / "year=2024")
    data = (named, f"{named}=0.5", str(tmp_path / "year=2023"))
    expected = [(named, 1.0), (named, 0.5), (str(tmp_path / "year"), 2023.0)]
    assert Settings(data=data).sources() == expected


@pytest.mark.parametrize(("word", "value"), [("auto", None), ("0", 0), ("12", 12)])
def test_a_number_may_be_found_out(word, value):
    words = ["--data", "a.txt", "--offload-layers", word, "--tile-tokens", word]
    actual = read(words)
    assert (actual.offload_layers, actual.tile_tokens) == (value, value)


def test_steps_are_counted_in_tokens():
    fields = {"length": 1024, "micro_batch": 2}
    assert settings(**fields).accumulation(4) == 1
    assert settings(**fields, tokens_per_step=2**16).accumulation(4) == 8
    with pytest.raises(UsageError, match="multiple of 6144 .3 processes x length 1024 x micro"):
        settings(**fields, tokens_per_step=2**16).accumulation(3)


def test_a_run_is_told_by_what_it_learns_and_not_by_where():
    one, same = settings(), settings(out="elsewhere", save_every=1, trackers=("wandb",))
    assert one.identity(2) == same.identity(2) and not set(FREE) & one.identity(2).keys()
    for other in (settings(lr=1e-3), settings(steps=300), settings(seed=1)):
        assert other.identity(2) != one.identity(2)
    assert one.identity(1) != one.identity(2)


@pytest.mark.parametrize("order", [(ADAPTER, ALL), (ALL, ADAPTER)], ids=["adapter", "all"])
def test_a_run_does_not_go_on_with_training_something_else(order, tmp_path):
    first, second = (settings(train=train).identity(1) for train in order)
    Log(tmp_path / "log.jsonl", first).close()
    with pytest.raises(LogError, match="log.jsonl was made with train"):
        Log(tmp_path / "log.jsonl", second)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        pytest.param(1, 0.5, id="rising"),
        pytest.param(2, 1.0, id="the largest"),
        # half way along the cosine: the mean of both ends
        pytest.param(6, 0.6, id="half way"),
        pytest.param(10, 0.2, id="the last"),
    ],
)
def test_the_learning_rate_rises_and_falls(step, rate):
    assert learning_rate(step, settings(steps=10, warmup=2, lr=1.0, lr_end=0.2)) == pytest.approx(
        rate
    )


def test_without_warmup_the_first_rate_is_nearly_the_largest():
    assert 0.9 < learning_rate(1, settings(steps=10, warmup=0, lr=1.0, lr_end=0.0)) < 1.0
