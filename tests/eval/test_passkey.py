"""The passkey command: prompts, scoring, output files and generation configs."""

import json
import shutil

import pytest
import torch
from long_runs import FILES, command
from words import CHAT, TEXT, make_tokenizer

from cab_hf.data import needles
from cab_hf.eval import haystack, passkey
from cab_hf.eval.haystack import Haystack, answered
from cab_hf.eval.passkey import Passkey
from cab_hf.experiment import models
from cab_hf.experiment.log import read_log
from cab_hf.ops import decode
from cab_hf.ops.decode.reference import LOCAL_TOKENS, SINK_TOKENS

LENGTH = 400
MATCHED = ["published", "streaming", "random", "antidiagonal", "oracle", "h2o"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize("filler", haystack.FILLERS)
@pytest.mark.parametrize("chat", [None, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_prompt_has_needle_at_depth_and_fits_length(chat, filler, keys, depth, text_file):
    tokenizer = make_tokenizer(chat)
    hay = Haystack(tokenizer, filler, keys, text_file if filler == "text" else None)
    for length in (250, 611):
        prompt = hay.prompt(length, depth, index=0)
        # a missing word has at most five tokens (a number) with this tokenizer
        assert length - 5 < len(prompt.tokens) <= length
        start, end = prompt.needle
        needle = tokenizer.decode(prompt.tokens[start:end]).replace(" ", "")
        assert needle.startswith("Thepasskey")
        assert needle.count(prompt.key) == 2
        # the haystack is between instruction and question; other needles shift the depth slightly
        haystack_tokens = length - 40 * keys
        tolerance = (20 + 30 * keys) / haystack_tokens
        assert start / haystack_tokens == pytest.approx(depth, abs=tolerance)
        question = tokenizer.decode(prompt.tokens[prompt.asking :]).replace(" ", "")
        assert question.startswith("Whatisthepasskey")
        assert prompt.asking >= end


def test_needles_are_at_sentence_borders(tokenizer):
    render, needles = Haystack(tokenizer).render, [(0.5, "HERE."), (0.9, "THERE.")]
    sentences = ["The grass is green."] * 10
    # all sentences have equal length, so depth 0.5 is after the fifth of ten
    expected = [*sentences[:5], "HERE.", *sentences[5:9], "THERE.", *sentences[9:]]
    assert " ".join(expected) in render("", needles, sentences)
    assert "HERE" not in render("", [], sentences)


@pytest.mark.parametrize(
    "change", [{"index": 1}, {"depth": 0.25}, {"length": 301}, {"seed": 1}], ids=str
)
def test_prompt_depends_on_length_depth_index_and_seed(tokenizer, change):
    place = {"length": 300, "depth": 0.5, "index": 0, "seed": 0}
    prompt = Haystack(tokenizer).prompt(**place)
    assert Haystack(tokenizer).prompt(**place) == prompt
    assert Haystack(tokenizer).prompt(**{**place, **change}).key != prompt.key


def test_samples_start_at_different_sentences(tokenizer, text_file):
    for hay in (Haystack(tokenizer), Haystack(tokenizer, "text", file=text_file)):
        starts = {hay.prompt(300, 1.0, index).tokens[:30] for index in range(12)}
        assert len(starts) > 2


def test_hide_needle_removes_keys_only(tokenizer):
    hay = Haystack(tokenizer, keys=4)
    shown, hidden = (hay.prompt(400, 0.5, 0, hide_needle=hide) for hide in (False, True))
    assert hidden.key == shown.key
    assert hidden.needle is None
    text = tokenizer.decode(hidden.tokens).replace(" ", "")
    assert not any(letter.isdigit() for letter in text)
    # each needle: two sentences with a key of 5 digits, one of "Remember it ."
    assert len(shown.tokens) - len(hidden.tokens) == 4 * len(
        tokenizer(needles.NEEDLE.format(whose=" for Bob", key="12345"))["input_ids"]
    )


def test_keys_are_distinct_from_distractors(tokenizer):
    hay = Haystack(tokenizer, "distractors", keys=8)
    text = tokenizer.decode(hay.prompt(1200, 0.5, 0).tokens).replace(" ", "")
    counts = sorted(text.count(f"passkeyfor{name}is") for name in needles.NAMES)
    # once in each needle, and once more in the beginning of the answer
    assert counts[-9:] == [0, 1, 1, 1, 1, 1, 1, 1, 2]
    assert "number" in text


def test_sentences_keep_their_quotes():
    sentences = ["It rained all day.", "The old town slept!", '"Who goes there?"', "asked nobody."]
    assert needles.split_sentences(TEXT) == [*sentences, "So it was, and so."]


def test_answers_are_scored_by_exact_number():
    for answer in ("48213.", " The key is 48213, not 11111", "7 times: 48213"):
        assert answered(answer, "48213")
    for answer in ("11111 or 48213", "48214", "482133", "4821", "48 213", ""):
        assert not answered(answer, "48213")


def test_depths_are_parsed_as_count_or_list():
    assert passkey.parse_depths("5") == (0, 0.25, 0.5, 0.75, 1)
    assert passkey.parse_depths("0.1,1") == (0.1, 1.0)


# --- the command


def test_passkey_command_asks_all_methods_the_same_prompts(model_folder, tmp_path):
    # without a dense tail, because tail rows attend to all keys outside of the window
    more = ("--cab", "dense_tail_blocks=0", "--controls", "1", "--trust-remote-code")
    methods = ["dense", "cab", *MATCHED]
    results = command(
        "passkey", model_folder, tmp_path, *more, methods=",".join(methods), drawn=True
    )
    assert {path.name for path in tmp_path.iterdir()} == FILES
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == [*methods, "full", "no_needle"]
    for row in rows.values():
        assert (row["length"], row["keys"], row["n"], row["stage"]) == (LENGTH, 1, 3, "prefill")
        assert row["low"] <= row["accuracy"] <= row["high"]
    assert rows["full"]["same"] == 3
    assert rows["full"]["density"] == rows["dense"]["density"] == 1.0
    for name in MATCHED:
        assert rows[name]["budget"] == pytest.approx(rows["cab"]["density"])
        # published has blocks of 64 tokens, so the density of a short prompt has coarse steps
        tolerance = 0.15 if name == "published" else 0.05
        assert rows[name]["density"] == pytest.approx(rows[name]["budget"], abs=tolerance)
    assert rows["streaming"]["outside_n"] == 2
    settings = results["provenance"]["settings"]
    assert (settings["model"], settings["trust_remote_code"]) == (model_folder.name, True)
    assert "--trust-remote-code True" in (tmp_path / "report.md").read_text()
    assert str(tmp_path) not in json.dumps(results)
    asked = {}
    for sample in read_log(tmp_path / "samples.jsonl")[1]:
        question = (sample["expected"], tuple(sample["needle"] or ()), sample["tokens"])
        if sample["method"] != "no_needle":
            asked.setdefault(sample["depth"], set()).add(question)
    assert [len(questions) for questions in asked.values()] == [1, 1, 1]


def test_stage_both_uses_sparse_decode(model_folder, tmp_path, monkeypatch):
    steps, attend = [], decode.attend

    def attending(q, k, v, choice, *told, **more):
        steps.append(choice)
        return attend(q, k, v, choice, *told, **more)

    monkeypatch.setattr(decode, "attend", attending)
    for stage in ("prefill", "both"):
        more = ("--stage", stage, "--budget", "0.3")
        out = tmp_path / stage
        results = command("passkey", model_folder, out, *more, methods="cab,random,streaming")
        # two layers, and several tokens after the first for each of three prompts
        assert bool(steps) == (stage == "both") and len(steps) % 2 == 0
    # sinks and local tokens are more than an eighth of such a short sequence
    kept = torch.cat([choice.counts.flatten() for choice in steps])
    always_read = SINK_TOKENS + LOCAL_TOKENS
    assert always_read > LENGTH // 8 and set(kept.tolist()) == {always_read}
    assert "decoded" not in (tmp_path / "prefill" / "report.md").read_text()
    lines = Passkey.tables(results["rows"])["Accuracy"].splitlines()[2:]
    decoded = [line.strip("| ").split(" | ")[-1] for line in lines]
    # values of cab, streaming and random
    assert decoded == ["sparsely", "sinks and window", "densely"]


OWN_OPTIONS = {
    "logits": {
        **{"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "guidance_scale": 5.0},
        **{"encoder_repetition_penalty": 9.0, "encoder_no_repeat_ngram_size": 1},
        **{"suppress_tokens": list(range(2, 60)), "sequence_bias": [[[9], 99.0]]},
        **{"begin_suppress_tokens": list(range(2, 90))},
        **{"bad_words_ids": [[each] for each in range(2, 90)]},
    },
    "beams": {"num_beams": 3, "forced_bos_token_id": 9, "forced_eos_token_id": 8},
    "sampling": {"do_sample": True, "temperature": 9.0, "top_k": 40, "num_return_sequences": 2},
    "limits": {
        **{"max_new_tokens": 1, "min_new_tokens": 1, "max_length": 3, "max_time": 1e-9},
        "stop_strings": ["a", "e"],
    },
    "outputs": {
        **{"return_dict_in_generate": True, "output_scores": True, "anything_else": 3},
        "cache_implementation": "static",
    },
    "cache": {"use_cache": False, "prompt_lookup_num_tokens": 3},
}


@pytest.fixture(scope="module")
def answers(model_folder, tmp_path_factory):
    """Return a function (generation config fields) -> answers of the model."""

    def answers(**fields):
        folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("own") / "model")
        given = {"eos_token_id": 1, "pad_token_id": 1, **fields}
        (folder / "generation_config.json").write_text(json.dumps(given))
        command("passkey", folder, folder.parent / "run", methods="dense")
        return [sample["answer"] for sample in read_log(folder.parent / "run" / "samples.jsonl")[1]]

    return answers


@pytest.fixture(scope="module")
def plain(answers):
    return answers()


@pytest.mark.parametrize("fields", OWN_OPTIONS.values(), ids=OWN_OPTIONS)
def test_generation_config_does_not_change_greedy_answers(answers, plain, fields):
    assert answers(**fields) == plain and all(plain)


def test_greedily_restores_generation_config(model_folder):
    model, _ = models.load_model(str(model_folder), "cpu", "float32")
    own = model.generation_config
    with pytest.raises(KeyboardInterrupt), models.greedy_generation(model, 8):
        raise KeyboardInterrupt
    assert model.generation_config is own
