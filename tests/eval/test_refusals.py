"""Invalid input: commands print one line to stderr, exit with status 2 and write no files."""

import json
import re

import pytest
from tiny import make_tiny_model
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)
from words import PROSE_TEXT, make_tokenizer, save_llama

from cab_hf import dispatch
from cab_hf.eval.__main__ import main
from cab_hf.eval.passkey import Passkey

# options with which each command is fast
FAST_OPTIONS = {
    "passkey": "--methods dense,cab --lengths 300 --depths 1 --samples 1 --controls 0",
    "fidelity": "--methods dense --lengths 900 --pass-samples 1 --documents 1 --keys 2",
    "calibrate": "--length 1500 --documents 1 --target-densities 0.9",
}
# content of the text and config files in the folder of the tests, by name
INPUT_CONTENT_BY_NAME = {
    **dict.fromkeys(("book.txt", "a/b.txt", "b.md", "b.json"), PROSE_TEXT.encode()),
    **{
        "binary": bytes(range(256)),
        "zeros": b"a text. \0 of zeros.",
        "empty": b"",
        "blank": b" \n",
    },
    **{"list.json": b"[]", "list.yaml": b"- mass_threshold: 0.5", "odd.yaml": b"wide: {weight: 3}"},
    **{"broken.yaml": b"lengths: [", "unknown.yaml": b"lenghts: 300"},
}


@pytest.fixture(scope="module")
def input_folder(tmp_path_factory):
    """Return a folder with a tiny model and with invalid input files."""
    input_folder = tmp_path_factory.mktemp("inputs")
    save_llama(input_folder / "own")
    for name in ("a", "folder"):
        (input_folder / name).mkdir()
    for name, content in INPUT_CONTENT_BY_NAME.items():
        (input_folder / name).write_bytes(content)
    return input_folder


@pytest.fixture
def get_refusal(input_folder, tmp_path, capsys, monkeypatch):
    """Return a function that runs a command with invalid options, and returns the error message.

    The working directory contains the files of `INPUT_CONTENT_BY_NAME`. The function checks that
    the error is one line on stderr, that the exit status is 2, and that no file was written.
    """
    monkeypatch.chdir(input_folder)
    out = tmp_path / "out"

    def run_invalid_command(command, options, model="own"):
        arguments = [*command.split(), *options.split()]
        if command in FAST_OPTIONS:
            model_options = ["--model", model, *FAST_OPTIONS[command].split(), "--device", "cpu"]
            arguments = [arguments[0], *model_options, *arguments[1:]]
        capsys.readouterr()
        try:
            status = main(
                [*arguments, *([] if "--out=" in " ".join(arguments) else ["--out", str(out)])]
            )
        except SystemExit as stop:
            status = stop.code
        error = capsys.readouterr().err
        assert status == 2 and error.count("\n") == 1 and error.startswith("python -m cab_hf.eval")
        assert not out.exists()
        return error

    return run_invalid_command


def parse_cases(case_table):
    """Yield pytest parameters from a value of `CASES_BY_COMMAND`: options, and error pattern.

    A case is ``option=value ... > expected``, and cases are separated by `` ; `` or a line break.
    ``expected`` is the name of the refused setting, or a part of the error. Without ``expected``,
    the refused setting is the last option of the case.
    """
    for case in re.split(r" ; |\n", case_table.strip()):
        options, _, expected = case.partition(" > ")
        options = [f"--{option}" for option in options.split()]
        setting_name = expected or options[-1].strip("-").partition("=")[0].replace("-", "_")
        is_setting_name = re.fullmatch(r"\w+", setting_name)
        message = rf"\b{setting_name}( is | must |: |')" if is_setting_name else re.escape(expected)
        yield pytest.param(" ".join(options), message, id=case)


# option that replaces LENGTH in the cases of a command
LENGTH_OPTION_BY_COMMAND = {"passkey": "lengths", "fidelity": "lengths", "calibrate": "length"}
# command, or several commands with the same options -> cases, see `parse_cases`
CASES_BY_COMMAND = {
    "passkey fidelity calibrate": """
model=no/such/model > model 'no/such/model' does not exist
model=folder > model 'folder' cannot be loaded ; model=book.txt > model 'book.txt' cannot be loaded
device=gpu ; device=cuda:99 ; device=meta ; dtype=int8 ; dtype=load ; dtype=float13
LENGTH=30 > must have room for
LENGTH=99999 > must be at most 2048, the ; LENGTH=0 ; LENGTH=-5 ; LENGTH=1e3
cab=mas=1 > mas ; cab=mass_threshold=9 > mass_threshold ; cab=engine=magic > engine
cab=predictor=magic > predictor ; config=unknown.yaml > the unknown option 'lenghts'
config=broken.yaml ; config=binary ; config=none.yaml
out=book.txt > book.txt/FIRST cannot be written ; out=book.txt/deep > cannot be written
out=/proc/none > cannot be written ; zzz > unknown option '--zzz'
trust-remote-code=maybe
""",
    "passkey": """
samples=-1 ; methods=random > budget ; filler=text > haystack ; filler=text haystack=no.txt
cab=engine ; cab=mass_threshold=3 > mass_threshold ; cab=weight=3 > weight
stage=both lengths=511 cab=decode_tokens=128 > lengths ; samples=0 ; methods=magic ; budget=1.5
depths=0.5,1.5 ; controls=9 ; stage=decode ; filler=prose ; haystack=x.txt ; keys=99 ; lengths=many
""",
    "fidelity": """
methods=snapkv probes=decode prefill-chunk=64 ; methods=cab,h2o probes=decode > match
equal=time budgets=0.3 ; budgets=match,2 ; methods=random > budgets ; probes=pass,guess
probes=recall_border variant=a=query_block=256 variant=b=query_block=384 > probes
probes=decode lengths=584 variant=a=sparse_decode=true,decode_tokens=128 > lengths
probes=turns lengths=2560,1279 cab=query_block=128 > must be at least 1280 each for turns
probes=turns methods=dense,published budgets=0.5 lengths=639 > must be at least 640 each
probes=turns methods=h2o ; probes=uuid lengths=90 > must have room ; asked=0 probes=asked > asked
variant=wide=weight=3 > weight ; variant=wide=mass_threshold=3 > mass_threshold
variant=wide=list.json > must be a dict of CabConfig ; variant=odd.yaml > weight ; methods=h2o
methods=magic ; equal=speed ; match=cab:wide ; lengths=1 ; documents=-1 ; documents=0 ; written=0
keys=99 ; asked=99 ; texts=no.txt ; texts=a/b.txt,b.md ; variant=wide ; variant=wide=
variant==mass_threshold=0.08 ; variant=wide=no.json ; variant=wide=b.json ; variant=no.yaml
variant=list.yaml
""",
    "calibrate": """
target-densities=7 > must be in (0, 1] ; target-densities=1.5 ; target-densities=0.001
cab=mas=1 > mas ; documents=0 ; texts=nowhere.txt
""",
    "speed attention": """
cab=mass_threshold=3 > mass_threshold ; cab=weight=3 > weight ; heads=6 kv-heads=4 > heads
lengths=0 ; batch=0 ; dtype=int8 ; layouts=ragged
layouts=padded directions=forward,backward > directions must be forward for layouts
blocks=100x10 > a multiple of 16 ; densities=1.5 > max_density
cab=max_density=0.3 > cab must not set max_density
device=gpu ; seed=99999999999999999999 ; directions=sideways ; engines=steam ; blocks=128
head-dims=0 ; heads=5
""",
    "speed ttft": """
cab=engine=magic > engine ; max-density=512:0.1 > pairs that include 256 tokens
max-density=512:0.1 lengths=256 > max_density
cab=max_density=0.3 > cab must not set max_density
device=meta
max-density=much ; max-density=1.5 ; heads=3 ; layers=0 ; implementations=FA9 ; runs=0
behind=9 lengths=64 > must be at least query_block=128 each after a cache
chunk=100 ; chunk=-128 > 0 or more ; multiple=0
longest max-density=256:0.2 lengths=256 > max_density
chunk=128 implementations=SDPA > chunk must be 0 for SDPA ; chunk=128 behind=256 > chunk must be 0
longest behind=256 > longest ; gpu-gib=8 > 0 on a CPU ; gpu-gib=-1 > 0 or more
""",
    "speed lora": """
implementations=cab-always > must be out of sdpa, cab ; spread=cp implementations=sdpa
spread=alone,cp > torchrun --nproc_per_node=N -m cab_hf.eval speed lora.
longest max-density=256:0.1,512:0.2 ; longest max-density=512:0.1 lengths=512 > max_density
rank=0 ; spread=fsdp1 ; multiple=0 ; gpu-gib=8 > 0 on a CPU
""",
    "speed context-parallel": """
max-density=512:0.1 > that include 1,024 tokens
cab=query_block=256 > must have blocks that divide 128
shape=gpt ; schemes=ulysses ; directions=back ; runs=0 ; device=cpu:0
""",
    "speed decode": """
budgets=1.5 > decode_tokens ; cab=decode_tokens=128 > cab must not set decode_tokens
parts=mlp ; kernels=FA9 ; batches=0
""",
    "speed serve": """
requests=1,1024:2 > must be for lengths among 256, 512
implementations=FA3 > must be out of sdpa, flash_attention_3
requests=256:2 ; requests=-1 ; requests=0 ; max-density=0.1,512:0.2 ; new-tokens=1 ; rate=-1
shared=256 ; memory=2 ; page-size=2 ; warm-up=0 ; batch-tokens=0 ; blocks=0
""",
}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        pytest.param(command, *case.values, id=f"{command} {case.id}")
        for commands, table in CASES_BY_COMMAND.items()
        for command in ([commands] if "speed" in commands else commands.split())
        for case in parse_cases(
            table.replace("LENGTH", LENGTH_OPTION_BY_COMMAND.get(command, "")).replace(
                # the first file that the command writes
                "/FIRST",
                "" if command == "calibrate" else "/samples.jsonl",
            )
        )
    ],
)
def test_invalid_setting_is_refused_in_one_line(get_refusal, command, options, message):
    device = "--device cpu " if "speed" in command and "--device" not in options else ""
    assert re.search(message, get_refusal(command, device + options))


@pytest.mark.parametrize(
    "command", ["passkey --filler text --haystack", "fidelity --texts", "calibrate --texts"]
)
@pytest.mark.parametrize(
    ("file_name", "reason"),
    [
        *(("binary", "not UTF-8"), ("zeros", "binary"), ("empty", "empty"), ("blank", "empty")),
        *(("folder", None), ("none.txt", None)),
    ],
)
def test_invalid_text_file_is_refused_in_one_line(get_refusal, command, file_name, reason):
    command, options = command.split(maxsplit=1)
    message = f"UTF-8 text file, got '{file_name}' ({reason})" if reason else "must be"
    assert message in get_refusal(command, f"{options} {file_name}")


@pytest.mark.parametrize(
    "arguments", ["--results none", "--results book.txt", "--page none.md", "--page folder"]
)
def test_invalid_page_arguments_are_refused_in_one_line(
    input_folder, monkeypatch, capsys, arguments
):
    monkeypatch.chdir(input_folder)
    assert main(["readme", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m cab_hf.eval readme: ") and error.count("\n") == 1


@pytest.fixture
def run_command(input_folder, tmp_path, capsys):
    """Return a function that runs a command on a model with its options in `FAST_OPTIONS`.

    The function returns the exit status and the last line on stderr.
    """

    def run_command(command, model=input_folder / "own"):
        arguments = (
            f"{command} --model {model} {FAST_OPTIONS[command]} --device cpu --out {tmp_path}/out"
        )
        method_options = ["--methods", "dense,cab"] if command == "fidelity" else []
        return main([*arguments.split(), *method_options]), (
            capsys.readouterr().err.splitlines() or [""]
        )[-1]

    return run_command


def save_model(model, folder):
    """Save a model and a tokenizer in ``folder``, and return the folder."""
    for saved_object in (model, make_tokenizer()):
        saved_object.save_pretrained(folder)
    return folder


NAN = float("nan")


@pytest.mark.parametrize(
    ("command", "parameter_name", "value"),
    [
        *((command, "model.embed_tokens.weight", NAN) for command in FAST_OPTIONS),
        ("passkey", "lm_head.weight", float("inf")),
    ],
    ids=[*FAST_OPTIONS, "infinite-outputs"],
)
def test_nonfinite_model_is_refused(
    input_folder, tmp_path, run_command, command, parameter_name, value
):
    model = LlamaForCausalLM.from_pretrained(input_folder / "own")
    model.get_parameter(parameter_name).data[:] = value
    status, error = run_command(command, save_model(model, tmp_path / "damaged"))
    assert status == 2
    assert "model: The model's outputs are not finite (NaN or infinite) under" in error
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize("command", ["passkey", "fidelity"])
def test_unsupported_model_is_refused(tmp_path, run_command, command):
    """An error that the library raises in a forward pass counts as invalid input."""
    config_fields = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config_fields |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 1}
    model = DogeForCausalLM(DogeConfig(**config_fields, vocab_size=len(make_tokenizer())))
    status, error = run_command(command, save_model(model, tmp_path / "doge"))
    assert status == 2 and "model: doge computes with its attention mask" in error


def test_nonfinite_outputs_of_one_method_name_its_attention(run_command, monkeypatch):
    monkeypatch.setattr(dispatch, "sparse", lambda call, *_: call.q * float("nan"))
    status, error = run_command("passkey")
    assert status == 2 and "not finite (NaN or infinite) under cab attention" in error


@pytest.mark.parametrize("error", [ValueError("of a builtin"), KeyError("lost"), RuntimeError()])
def test_bug_raises_its_exception(run_command, monkeypatch, error):
    def raise_error(self, prompt, method):
        raise error

    # the error comes from code outside of cab_hf
    monkeypatch.setattr(Passkey, "generate_answer", raise_error)
    with pytest.raises(type(error)):
        run_command("passkey")


def test_length_beyond_positions_includes_generated_tokens(tmp_path, get_refusal):
    """GPT-2 has learned positions, and needs one for each generated token."""
    config_fields = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 300, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(**config_fields, vocab_size=len(make_tokenizer())))
    message = "lengths must be at most 292, the positions"
    assert message in get_refusal(
        "passkey", "--lengths 293", str(save_model(model, tmp_path / "gpt2"))
    )


def test_length_up_to_positions_is_accepted(tmp_path, run_command):
    config_fields = {"vocab_size": len(make_tokenizer()), "eos_token_id": 1, "pad_token_id": 1}
    model = make_tiny_model(num_hidden_layers=1, max_position_embeddings=300, **config_fields)
    status, _ = run_command("passkey", save_model(model, tmp_path / "tiny"))
    assert status == 0
    (_, sample, *_) = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert 295 < json.loads(sample)["tokens"] <= 300
