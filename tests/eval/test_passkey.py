"""The passkey command: its prompts, its scoring, its files, and that it can be killed and go on."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import SPARSE_WORDS
from words import CHAT, TEXT, make_tokenizer

from cab_hf.eval import haystack, passkey
from cab_hf.eval.__main__ import main
from cab_hf.eval.haystack import Haystack, answered
from cab_hf.eval.passkey import Passkey, Settings
from cab_hf.ops import decode
from cab_hf.ops.decode.reference import LOCAL, SINKS
from cab_hf.runs import models
from cab_hf.runs.log import read_log
from cab_hf.texts import needles

LENGTH = 400
METHODS = "dense,cab,published,streaming,random,antidiagonal,oracle,h2o"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    return file


RESULTS = Path(haystack.__file__).parents[1] / "eval" / "results"
COMMITTED = sorted(RESULTS.glob("smollm2-*"))
FILES = {"samples.jsonl", "results.json", "results.csv", "report.md", "figure.png"}


def start(model_folder, out, *more, methods=METHODS):
    given = ["--model", model_folder, "--out", out, "--methods", methods, "--lengths", LENGTH]
    fixed = ["--depths", "3", "--samples", "1", "--device", "cpu"]
    fixed += [word for assignment in SPARSE_WORDS for word in ("--cab", assignment)]
    return main(["passkey", *map(str, (*given, *fixed, *more))])


def command(model_folder, out, *more, methods=METHODS):
    assert start(model_folder, out, *more, methods=methods) == 0
    return json.loads((out / "results.json").read_text())


def read_samples(out):
    return read_log(out / "samples.jsonl")[1]


# --- prompts


@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize("filler", haystack.FILLERS)
@pytest.mark.parametrize("chat", [None, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_prompts_fit_and_hold_the_needle_at_its_depth(chat, filler, keys, depth, text_file):
    tokenizer = make_tokenizer(chat)
    hay = Haystack(tokenizer, filler, keys, text_file if filler == "text" else None)
    for length in (250, 611):
        prompt = hay.prompt(length, depth, index=0)
        # the gap is less than a word, and a number is a word of five tokens here
        assert length - 5 < len(prompt.tokens) <= length
        start, end = prompt.needle
        needle = tokenizer.decode(prompt.tokens[start:end]).replace(" ", "")
        assert needle.startswith("Thepasskey")
        assert needle.count(prompt.key) == 2
        # the haystack lies between instruction and question; other needles move it a little
        room = length - 40 * keys
        assert start / room == pytest.approx(depth, abs=(20 + 30 * keys) / room)
        question = tokenizer.decode(prompt.tokens[prompt.asking :]).replace(" ", "")
        assert question.startswith("Whatisthepasskey")
        assert prompt.asking >= end


def test_needles_stand_at_sentence_borders(tokenizer):
    render, needles = Haystack(tokenizer).render, [(0.5, "HERE."), (0.9, "THERE.")]
    sentences = ["The grass is green."] * 10
    # all of one size, so that half is behind the fifth
    expected = [*sentences[:5], "HERE.", *sentences[5:9], "THERE.", *sentences[9:]]
    assert " ".join(expected) in render("", needles, sentences)
    assert "HERE" not in render("", [], sentences)


def test_the_answer_is_begun(tokenizer):
    prompt = Haystack(make_tokenizer(CHAT), keys=3).prompt(300, 0.5, index=0)
    text = tokenizer.decode(prompt.tokens)
    assert text.split("assistant : ")[1].startswith("The pass key for ")
    assert text.endswith(" is")


@pytest.mark.parametrize(
    "change", [{"index": 1}, {"depth": 0.25}, {"length": 301}, {"seed": 1}], ids=str
)
def test_a_prompt_is_a_function_of_its_place(tokenizer, change):
    place = {"length": 300, "depth": 0.5, "index": 0, "seed": 0}
    prompt = Haystack(tokenizer).prompt(**place)
    assert Haystack(tokenizer).prompt(**place) == prompt
    assert Haystack(tokenizer).prompt(**{**place, **change}).key != prompt.key


def test_samples_start_at_places_of_their_own(tokenizer, text_file):
    for hay in (Haystack(tokenizer), Haystack(tokenizer, "text", file=text_file)):
        starts = {hay.prompt(300, 1.0, index).tokens[:30] for index in range(12)}
        assert len(starts) > 2


def test_no_needle_leaves_out_every_key_and_nothing_else(tokenizer):
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


def test_keys_differ_and_distractors_are_none_of_them(tokenizer):
    hay = Haystack(tokenizer, "distractors", keys=8)
    text = tokenizer.decode(hay.prompt(1200, 0.5, 0).tokens).replace(" ", "")
    counts = sorted(text.count(f"passkeyfor{name}is") for name in needles.NAMES)
    # once in each needle, once more where the answer is begun
    assert counts[-9:] == [0, 1, 1, 1, 1, 1, 1, 1, 2]
    assert "number" in text


def test_sentences_keep_their_quotes():
    assert needles.split_sentences(TEXT) == [
        "It rained all day.",
        "The old town slept!",
        '"Who goes there?"',
        "asked nobody.",
        "So it was, and so.",
    ]


# --- scoring


def test_decoded_text_is_scored():
    for answer in ("48213.", " The key is 48213, not 11111", "7 times: 48213"):
        assert answered(answer, "48213")
    for answer in ("11111 or 48213", "48214", "482133", "4821", "48 213", ""):
        assert not answered(answer, "48213")


# --- settings


def test_settings_from_the_command_line_reach_cab():
    chosen = Settings(
        cab=("mass_threshold=0.08", "dense_layers=(0, 2)", "engine=gather"), stage="both"
    )
    config = chosen.cab_config
    assert (config.mass_threshold, config.dense_layers, config.engine) == (0.08, (0, 2), "gather")
    assert (config.min_length, config.sparse_decode) == (0, True)
    assert passkey.parse_depths("5") == (0, 0.25, 0.5, 0.75, 1)
    assert passkey.parse_depths("0.1,1") == (0.1, 1.0)


# --- the command


def test_the_command_writes_its_files(model_folder, tmp_path):
    # with a tail the question itself sees everything, outside of any window
    results = command(model_folder, tmp_path, "--cab", "dense_tail_blocks=0")
    assert {path.name for path in tmp_path.iterdir()} == FILES
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == [*METHODS.split(","), "full", "no_needle"]
    for row in rows.values():
        assert (row["length"], row["keys"], row["n"], row["stage"]) == (LENGTH, 1, 3, "prefill")
        assert row["low"] <= row["accuracy"] <= row["high"]
    assert rows["full"]["same"] == 3
    assert rows["full"]["density"] == rows["dense"]["density"] == 1.0
    for name in ("published", "streaming", "random", "antidiagonal", "oracle", "h2o"):
        assert rows[name]["budget"] == pytest.approx(rows["cab"]["density"])
        # published has blocks of 64 tokens, few of them in so short a prompt
        tolerance = 0.15 if name == "published" else 0.05
        assert rows[name]["density"] == pytest.approx(rows[name]["budget"], abs=tolerance)
    assert rows["streaming"]["outside_n"] == 2
    assert results["provenance"]["settings"]["model"] == model_folder.name
    assert str(tmp_path) not in json.dumps(results)


def test_every_method_is_asked_the_same(model_folder, tmp_path):
    command(model_folder, tmp_path, "--keys", "2", methods="dense,cab,streaming,h2o")
    asked = {}
    for sample in read_samples(tmp_path):
        question = (sample["expected"], tuple(sample["needle"] or ()), sample["tokens"])
        if sample["method"] != "no_needle":
            asked.setdefault(sample["depth"], set()).add(question)
    assert [len(questions) for questions in asked.values()] == [1, 1, 1]


def test_a_killed_run_goes_on(model_folder, tmp_path, monkeypatch):
    methods = "dense,cab,random"
    complete = command(model_folder, tmp_path / "whole", methods=methods)
    killed, calls, answer = tmp_path / "killed", [], passkey.Passkey.answer

    def counted(self, prompt, method):
        calls.append(prompt)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return answer(self, prompt, method)

    monkeypatch.setattr(passkey.Passkey, "answer", counted)
    with pytest.raises(KeyboardInterrupt):
        command(model_folder, killed, methods=methods)
    with open(killed / "samples.jsonl", "a") as file:
        file.write('{"method": "cab", "leng')
    # 4 were answered, 1 was cut off; the other 10 were left to do
    assert command(model_folder, killed, methods=methods)["rows"] == complete["rows"]
    assert len(calls) == 5 + (15 - 4)


def test_both_stages_are_sparse_when_asked(model_folder, tmp_path, monkeypatch):
    steps, attend = [], decode.attend

    def attending(q, k, v, choice, *told):
        steps.append(choice)
        return attend(q, k, v, choice, *told)

    monkeypatch.setattr(decode, "attend", attending)
    for stage in ("prefill", "both"):
        options = ("--stage", stage, "--budget", "0.3", "--controls", "0")
        methods = "cab,random,streaming"
        results = command(model_folder, tmp_path / stage, *options, methods=methods)
        # of two layers, of each of three prompts some tokens behind the first
        assert bool(steps) == (stage == "both") and len(steps) % 2 == 0
    # what is always read is more than an eighth of so short a text
    kept = torch.cat([choice.counts.flatten() for choice in steps])
    assert LENGTH // 8 < SINKS + LOCAL and set(kept.tolist()) == {SINKS + LOCAL}
    assert "decoded" not in (tmp_path / "prefill" / "report.md").read_text()
    lines = Passkey.tables(results["rows"])["Accuracy"].splitlines()[2:]
    said = [line.strip("| ").split(" | ")[-1] for line in lines]
    # cab, streaming and random
    assert said == ["sparsely", "sinks and window", "densely"]


RATHER = {
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
def answers_with(model_folder, tmp_path_factory):
    """(fields) -> what a model answers whose generation config has these fields."""

    @cache
    def answers(name):
        folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("own") / "model")
        given = {"eos_token_id": 1, "pad_token_id": 1, **RATHER.get(name, {})}
        (folder / "generation_config.json").write_text(json.dumps(given))
        command(folder, folder.parent / "run", "--controls", "0", methods="dense")
        return [sample["answer"] for sample in read_samples(folder.parent / "run")]

    return answers


@pytest.mark.parametrize("name", RATHER)
def test_answers_are_greedy_whatever_the_model_would_rather(answers_with, name):
    assert answers_with(name) == answers_with("nothing") and all(answers_with(name))


def test_the_config_of_a_model_is_put_back(model_folder):
    model, _ = models.load_model(str(model_folder), "cpu", "float32")
    own = model.generation_config
    with pytest.raises(KeyboardInterrupt), models.greedily(model, 8):
        raise KeyboardInterrupt
    assert model.generation_config is own


def test_two_models_of_one_name_do_not_share_a_folder(model_folder, tmp_path, capsys):
    other, same = (shutil.copytree(model_folder, tmp_path / x / model_folder.name) for x in "ab")
    shown = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**shown, "rms_norm_eps": 0.5}))
    out = tmp_path / "out"
    command(model_folder, out, "--controls", "0", methods="dense")
    before = (out / "samples.jsonl").read_bytes()
    assert start(other, out, "--controls", "0", methods="dense,cab") == 2
    output = "made with model_sha256 '[0-9a-f]{64}', this run has '[0-9a-f]{64}'; give another"
    assert re.search(output, capsys.readouterr().err)
    assert (out / "samples.jsonl").read_bytes() == before
    assert start(same, out, "--controls", "0", methods="dense,cab") == 0


def test_code_that_is_trusted_is_told_in_the_command(model_folder, tmp_path):
    given = ("--trust-remote-code", "--controls", "0")
    results = command(model_folder, tmp_path, *given, methods="dense")
    assert "--trust-remote-code True" in (tmp_path / "report.md").read_text()
    assert results["provenance"]["settings"]["trust_remote_code"] is True


# --- rows


def sample(method, index, correct, **more):
    place = {"method": method, "length": 8, "keys": 1, "depth": 0.5, "index": index}
    fixed = {"budget": None, "density": 1.0, "reached": None, "answer": str(correct)}
    return {**place, "correct": correct, **fixed, **more}


def test_a_method_that_was_dense_attention_is_said_to_be():
    samples = [
        *(sample(name, 0, True, sparse_density=None) for name in ("dense", "h2o", "cab")),
        sample("random", 0, True, density=0.4, sparse_density=0.4),
    ]
    settings = {"stage": "prefill", "filler": "noise"}
    for method in ("random", "published"):
        rows = Passkey.rows([*samples, sample(method, 1, True, sparse_density=None)], settings)
        *_, given = Passkey.readings(rows)
        assert given.startswith("No layer attended sparsely under cab at 8 tokens")
        # one of the samples of random was sparse
        assert ("published at 8 tokens" in given) == (method == "published")
        assert "random" not in given and "h2o" not in given and "dense at 8" not in given


def test_rows_by_hand():
    samples = [
        *(sample("dense", i, i < 3) for i in range(4)),
        *(sample("cab", i, i < 2, density=0.1 * i) for i in range(4)),
        *(sample("streaming", i, i < 2, reached=i == 0) for i in range(3)),
        sample("full", 2, True),
    ]
    settings = {"stage": "prefill", "filler": "noise"}
    dense, cab, streaming, full = Passkey.rows(samples, settings)
    assert (dense["n"], dense["correct"], dense["accuracy"]) == (4, 3, 0.75)
    assert "delta" not in dense
    assert cab["density"] == pytest.approx(0.15)
    assert cab["delta"] == pytest.approx(-0.25)
    assert cab["delta_low"] < -0.25 < cab["delta_high"]
    # only the samples both answered are compared
    assert (streaming["pairs"], streaming["delta"]) == (3, pytest.approx(-1 / 3))
    assert (streaming["outside_n"], streaming["outside_correct"]) == (2, 1)
    assert (full["pairs"], full["same"]) == (1, 1)
    assert list(cab["by_depth"].items()) == [("0.5", 0.5)]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_committed_rows_follow_from_their_samples(folder):
    content = json.loads((folder / "results.json").read_text())
    identity, samples = read_log(folder / "samples.jsonl")
    settings = content["provenance"]["settings"]
    assert identity.items() <= {"experiment": "passkey", **settings}.items()
    # as shown: the last digits are the library's
    assert Passkey.tables(Passkey.rows(samples, settings)) == Passkey.tables(content["rows"])


def test_a_run_can_be_extended_by_methods(model_folder, tmp_path):
    command(model_folder, tmp_path, "--controls", "0", methods="dense,cab")
    results = command(model_folder, tmp_path, "--controls", "0", methods="cab,streaming")
    assert [row["method"] for row in results["rows"]] == ["dense", "cab", "streaming"]
    assert results["provenance"]["settings"]["methods"] == ["dense", "cab", "streaming"]
