"""The sweep over model types: the families that matter, its verdicts, its guard, its files."""

import json
import math
import re

import pytest
import torch
from marks import since, slow_but
from torch.multiprocessing import start_processes
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cab_hf.eval import __main__, examined, families
from cab_hf.eval.families import EXACT, FAILS, IN_PART, NOT_BUILT, NOT_OURS, REFUSED, WRONG

# with experts, latent keys, windows, recurrent layers, cross-attention, layers that differ
EXACT_TYPES = """
    llama mistral ministral mixtral qwen2 qwen3 qwen3_moe gemma gemma3 gemma4_text phi3 phimoe olmo2
    granite cohere2 glm4 deepseek_v3 smollm3 starcoder2 stablelm gpt_neox opt bert minimax
    granitemoehybrid mllama gpt_oss gpt_bigcode
"""
# with an older transformers their own attention is another one
CHANGED_TYPES = [
    pytest.param("gemma2", marks=since("5.24", "sdpa caps no logits")),
    pytest.param("llama4", marks=since("5.24", "chunks are counted from the start of the row")),
]
# the last seven with attention that no registered function reaches
REFUSED_TYPES = """
    deepseek_v4 doge minimax_m3_vl_text deepseek_v32
    falcon bloom mpt gpt_neo xglm openai-gpt mamba
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, as the processes of a run do: these models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def judged(model_type):
    return families.judged({"model_type": model_type, **examined.examine(model_type)})


@pytest.mark.parametrize("model_type", [*EXACT_TYPES.split(), *CHANGED_TYPES])
def test_a_type_attends_exactly(model_type):
    row = judged(model_type)
    assert row["by_name"] == row["applied"] == EXACT, row
    assert row.get("windowed", EXACT) == EXACT, row
    assert row["layers"] >= row["sparse"] > 0 and row["reads_padding"] == []


@pytest.mark.parametrize("model_type", REFUSED_TYPES.split())
def test_a_type_is_refused_in_a_sentence(model_type):
    row = judged(model_type)
    assert row["verdict"] == REFUSED, row
    if model_type in REFUSED_TYPES.splitlines()[1]:
        assert "attn_implementation=" in row["said"] and row["said"].endswith(".")


# --- over ranks

# with experts and their routers' loss, latent keys, windows, learnt positions, layers that differ
EXACT_OVER_RANKS = "llama mixtral gemma3 deepseek_v3 gpt2"
# by what a type does -> what its refusal says
REFUSED_OVER_RANKS = {
    "bamba": r"BambaForCausalLM has layers that mix tokens without attention \(BambaMixer\)",
    "bart": "BartForCausalLM takes no position_ids",
    "roberta": "RobertaForCausalLM counts positions from padding_idx",
    "stablelm": "StableLmForCausalLM does not pass position_ids and cu_seq_lens_q",
    "minimax_m3_vl_text": r"MiniMaxM3VLAttention .* is not computed by 'cab' \(keys chosen",
    "llama4": "attends in chunks of 64 tokens",
    "bloom": "must reach its attention through",
}


def judged_over_ranks(model_type):
    sample = examined.in_processes(model_type, 2, 120, 24)
    return families.judged({"model_type": model_type, **sample})


@pytest.mark.parametrize("model_type", slow_but(EXACT_OVER_RANKS.split(), 0))
def test_a_type_computes_over_ranks_what_it_does_in_one_process(model_type):
    row = judged_over_ranks(model_type)
    assert row["verdict"] == row["plain"] == EXACT, row
    assert row["layers"] > 0
    assert max(row["loss"], row["logits"], row["gradients"]) <= 1e-5


@pytest.mark.parametrize("model_type", REFUSED_OVER_RANKS)
def test_a_type_is_refused_over_ranks_in_a_sentence_that_names_the_cause(model_type):
    row = judged_over_ranks(model_type)
    assert row["verdict"] == REFUSED, row
    assert re.search(REFUSED_OVER_RANKS[model_type], row["said"])


@pytest.mark.slow
@pytest.mark.parametrize("build", ["windowed", "dynamic"])
def test_what_a_type_may_have_is_built_too(build):
    assert judged_over_ranks("mistral" if build == "dynamic" else "mixtral")[build] == EXACT


# --- verdicts


def without_the_first_key(module, query, key, value, mask, **options):
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    seen[1:, 0] = False
    return sdpa(module, query, key, value, seen[None, None], **options)


def not_a_number(module, query, *arguments, **options):
    return query.transpose(1, 2) * float("nan"), None


def a_traceback(module, *arguments, **options):
    raise KeyError("cab")


@pytest.mark.parametrize(
    ("function", "verdict"),
    [(without_the_first_key, WRONG), (not_a_number, FAILS), (a_traceback, FAILS)],
)
def test_what_is_not_right_is_seen(function, verdict):
    before = ALL_ATTENTION_FUNCTIONS["cab"]
    AttentionInterface.register("cab", function)
    try:
        assert judged("llama")["verdict"] == verdict
    finally:
        AttentionInterface.register("cab", before)


FINE, NO = {"difference": 1e-5}, {"refused": "cab does not."}
OFF, BROKEN = {"difference": 2e-4}, {"failed": "KeyError: 'cab'"}


def sample_of(by_name, applied, layers):
    """Return the sample of a type: outcomes of two inputs by each of two entry points."""
    sample = {"model_type": "x", "model": "X", "reads_padding": []}
    for name, outcomes in (("by_name", by_name), ("applied", applied)):
        inputs = dict(zip(("plain", "left padded"), outcomes, strict=True))
        sample[name] = {"inputs": inputs, "layers": layers, "sparse": layers}
    return sample


NAN = {"difference": float("nan")}
STEP = {"loss": 1e-7, "logits": 1e-7, "gradients": 9e-6, "layers": 2}


def sample_over_ranks(text, packed, _):
    return {"model_type": "x", "model": "X", "plain": {"one text": text, "packed": packed}}


@pytest.mark.parametrize(
    ("sample", "one", "other", "layers", "verdict"),
    [
        pytest.param(sample_of, [FINE, FINE], [FINE, FINE], 2, EXACT, id="exact"),
        pytest.param(sample_of, [FINE, FINE], [FINE, FINE], 0, NOT_OURS, id="not-reached"),
        pytest.param(sample_of, [NO, NO], [NO, NO], 2, REFUSED, id="refused"),
        pytest.param(sample_of, [FINE, NO], [FINE, NO], 2, IN_PART, id="one-input-refused"),
        pytest.param(sample_of, [FINE, FINE], [NO, NO], 2, IN_PART, id="one-door-refused"),
        pytest.param(sample_of, [FINE, OFF], [NO, NO], 2, WRONG, id="one-input-off"),
        pytest.param(sample_of, [BROKEN, BROKEN], [NO, NO], 2, FAILS, id="one-door-fails"),
        pytest.param(sample_of, [FINE, NAN], [FINE, FINE], 2, WRONG, id="not-a-number"),
        *(
            pytest.param(sample_over_ranks, text, packed, None, verdict, id=f"ranks-{name}")
            for name, text, packed, verdict in (
                ("exact", STEP, STEP, EXACT),
                ("refused", NO, NO, REFUSED),
                ("one-input-refused", STEP, NO, IN_PART),
                ("gradients-off", STEP, {**STEP, "gradients": 2e-5}, WRONG),
                ("not-a-number", {**STEP, "logits": math.inf}, STEP, WRONG),
                ("loss-off", {**STEP, "loss": 2e-5}, STEP, WRONG),
                ("an-error", BROKEN, NO, FAILS),
                ("not-reached", {**STEP, "layers": 0}, STEP, NOT_OURS),
            )
        ),
    ],
)
def test_the_worst_is_said_of_all(sample, one, other, layers, verdict):
    assert families.judged(sample(one, other, layers))["verdict"] == verdict


def test_an_input_with_padding_that_the_model_reads_is_not_compared():
    row = judged("recurrent_gemma")
    assert row["verdict"] == EXACT and row["reads_padding"] == ["left padded"]


# --- processes, command and files


@pytest.mark.parametrize(
    ("model_type", "ranks", "timeout", "memory", "why"),
    [
        ("llama", 1, 0.01, 12, "took longer than 0.01 seconds"),
        ("llama", 2, 0.001, 24, "took longer than 0.001 seconds"),
        ("gemma4_assistant", 1, 120, 12, "hidden_size_per_layer_input|Gemma4AssistantConfig"),
    ],
)
def test_a_type_that_cannot_be_examined_ends_nothing_else(model_type, ranks, timeout, memory, why):
    assert re.search(why, examined.in_processes(model_type, ranks, timeout, memory)["not_built"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_that_dies_ends_nothing_else(ranks, monkeypatch):
    def killed(*given):
        group = start_processes(*given)
        group.processes[0].kill()
        return group

    with monkeypatch.context() as patch:
        patch.setattr(examined, "start_processes", killed)
        fields = {"not_built": "its process died with exit code -9"}
        assert examined.in_processes("llama", ranks, 120, 24) == fields
    assert examined.in_processes("gemma", ranks, 120, 24)["model"] == "GemmaForCausalLM"


def verdicts_of(out, types, *words):
    """Return the verdicts of the command on types that `in_processes` examines."""
    assert __main__.main(["families", "--types", types, "--out", str(out), *words]) == 0
    rows = json.loads((out / "results.json").read_text())["rows"]
    return {row["model_type"]: row["verdict"] for row in rows}


def test_the_command_writes_everything(tmp_path, monkeypatch, capsys):
    def examine(model_type, *_):
        return {"not_built": "x"} if model_type == "gpt_neo" else examined.examine(model_type)

    monkeypatch.setattr(families, "in_processes", examine)
    expected = {"llama": EXACT, "doge": REFUSED, "gpt_neo": NOT_BUILT}
    assert verdicts_of(tmp_path, "llama,doge,gpt_neo") == expected
    assert "Of 3 types 2 could be built: 1 attend exactly" in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_the_command_writes_what_ranks_compute(tmp_path, monkeypatch):
    actual = {
        "llama": {"model": "L", "dtype": "float64", "plain": {"one text": STEP, "packed": STEP}},
        "bamba": {"model": "B", "plain": {"one text": NO, "packed": NO}},
        "opt": {"not_built": "no reason"},
    }
    monkeypatch.setattr(families, "in_processes", lambda model_type, ranks, *_: actual[model_type])
    expected = {"llama": EXACT, "bamba": REFUSED, "opt": NOT_BUILT}
    assert verdicts_of(tmp_path, ",".join(actual), "--ranks", "2") == expected
