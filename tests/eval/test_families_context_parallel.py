"""The sweep over model types on two ranks: a few types, its verdicts, its guard, its files."""

import json
import math

import pytest
from marks import slow_but

from cab_hf.eval import __main__
from cab_hf.eval import families_context_parallel as sweep
from cab_hf.eval.families import EXACT, FAILS, IN_PART, NOT_BUILT, NOT_OURS, REFUSED, WRONG

# with experts and their routers' loss, latent keys, windows, learnt positions, layers that differ
EXACT_TYPES = "llama mixtral gemma3 deepseek_v3 gpt2"
# by what a type does -> what its refusal says
REFUSED_TYPES = {
    "bamba": r"BambaForCausalLM has layers that mix tokens without attention \(BambaMixer\)",
    "bart": "BartForCausalLM takes no position_ids",
    "roberta": "RobertaForCausalLM counts positions from padding_idx",
    "stablelm": "StableLmForCausalLM does not hand position_ids and cu_seq_lens_q on",
    "minimax_m3_vl_text": r"MiniMaxM3VLAttention .* is not computed by 'cab' \(keys chosen",
    "gemma2": "soft-capped logits",
    "bloom": "attention is not reached",
}


@pytest.fixture(scope="module")
def pair():
    ranks = sweep.Ranks(24)
    yield ranks
    ranks.end()


def judged(pair, model_type):
    return sweep.FamiliesContextParallel.row(
        {"model_type": model_type, **pair.examine(model_type, 120)}
    )


@pytest.mark.parametrize("model_type", slow_but(EXACT_TYPES.split(), 0, 1))
def test_a_type_computes_over_ranks_what_it_does_in_one_process(pair, model_type):
    row = judged(pair, model_type)
    assert row["verdict"] == row["plain"] == EXACT, row
    assert row["layers"] > 0
    assert max(row["loss"], row["logits"], row["gradients"]) <= 1e-5


@pytest.mark.parametrize("model_type", REFUSED_TYPES)
def test_a_type_is_refused_in_a_sentence_that_names_the_cause(pair, model_type):
    row = judged(pair, model_type)
    assert row["verdict"] == REFUSED, row
    with pytest.raises(ValueError, match=REFUSED_TYPES[model_type]):
        raise ValueError(row["said"])


@pytest.mark.parametrize("build", slow_but(["windowed", "dynamic"], 1))
def test_what_a_type_may_have_is_built_too(pair, build):
    assert judged(pair, "mistral" if build == "dynamic" else "mixtral")[build] == EXACT


def test_ranks_that_hang_are_started_anew():
    ranks = sweep.Ranks(24)
    try:
        fields = {"not_built": "took longer than 0.001 seconds"}
        assert ranks.examine("llama", 0.001) == fields
        ranks._start()
        ranks.processes[1].kill()
        assert ranks.examine("llama", 120) == {"not_built": "a rank died"}
        assert ranks.processes == []
    finally:
        ranks.end()


FINE = {"loss": 1e-7, "logits": 1e-7, "gradients": 9e-6, "layers": 2}
NO, BROKEN = {"refused": "cab does not."}, {"failed": "KeyError: 'cab'"}


@pytest.mark.parametrize(
    ("text", "packed", "verdict"),
    [
        pytest.param(FINE, FINE, EXACT, id="exact"),
        pytest.param(NO, NO, REFUSED, id="refused"),
        pytest.param(FINE, NO, IN_PART, id="one-input-refused"),
        pytest.param(FINE, {**FINE, "gradients": 2e-5}, WRONG, id="gradients-off"),
        pytest.param({**FINE, "logits": math.inf}, FINE, WRONG, id="not-a-number"),
        pytest.param({**FINE, "loss": 2e-5}, FINE, WRONG, id="loss-off"),
        pytest.param(BROKEN, NO, FAILS, id="an-error"),
        pytest.param({**FINE, "layers": 0}, FINE, NOT_OURS, id="not-reached"),
    ],
)
def test_the_worst_is_said_of_all(text, packed, verdict):
    sample = {"model_type": "x", "model": "X", "plain": {"one text": text, "packed": packed}}
    assert sweep.FamiliesContextParallel.row(sample)["verdict"] == verdict


def test_the_command_writes_everything(tmp_path, monkeypatch, capsys):
    actual = {
        "llama": {"model": "L", "dtype": "float64", "plain": {"one text": FINE, "packed": FINE}},
        "bamba": {"model": "B", "plain": {"one text": NO, "packed": NO}},
        "opt": {"not_built": "no reason"},
    }
    monkeypatch.setattr(sweep.Ranks, "examine", lambda _, model_type, timeout: actual[model_type])
    command = ["families-context-parallel", "--types", ",".join(actual), "--out", str(tmp_path)]
    assert __main__.main(command) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    verdicts = {row["model_type"]: row["verdict"] for row in rows}
    assert verdicts == {"llama": EXACT, "bamba": REFUSED, "opt": NOT_BUILT}
    shown = (
        "Of 3 types 2 could be built: 1 compute over ranks what one process does, 1 are refused in "
        "a sentence, none do anything else."
    )
    assert shown in capsys.readouterr().out
    report = (tmp_path / "report.md").read_text()
    assert "| exact | 1 | llama |" in report and "cab does not." in report
    assert (tmp_path / "figure.png").stat().st_size > 0
