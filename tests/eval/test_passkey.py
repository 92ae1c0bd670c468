"""The passkey command: prompts, scoring, output files and generation configs."""

import json
import shutil

import pytest
import torch
from long_runs import RESULT_FILE_NAMES, run_eval_and_read_results
from words import CHAT_TEMPLATE, PROSE_TEXT, make_tokenizer

from cab_hf.data import needles
from cab_hf.eval import passkey
from cab_hf.eval.haystack import FILLERS, Haystack, is_right_answer
from cab_hf.eval.passkey import Passkey
from cab_hf.experiment import models
from cab_hf.experiment.log import read_log
from cab_hf.ops import decode
from cab_hf.ops.decode.reference import LOCAL_TOKENS, SINK_TOKENS

PROMPT_TOKENS = 400
MATCHED_METHODS = ["published", "streaming", "random", "antidiagonal", "oracle", "h2o"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def text_file(tmp_path):
    """Return the path of a text file."""
    prose_file = tmp_path / "book.txt"
    prose_file.write_text(PROSE_TEXT)
    return prose_file


@pytest.mark.parametrize("num_keys", [1, 4])
@pytest.mark.parametrize("filler", FILLERS)
@pytest.mark.parametrize("chat_template", [None, CHAT_TEMPLATE], ids=["plain", "chat"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_prompt_has_needle_at_depth_and_fits_length(
    chat_template, filler, num_keys, depth, text_file
):
    tokenizer = make_tokenizer(chat_template)
    haystack = Haystack(tokenizer, filler, num_keys, text_file if filler == "text" else None)
    for length in (250, 611):
        prompt = haystack.make_prompt(length, depth, index=0)
        # the prompt is shorter than the length by less than a word, which has at most five tokens
        assert length - 5 < len(prompt.tokens) <= length
        needle_start, needle_end = prompt.needle_span
        needle = tokenizer.decode(prompt.tokens[needle_start:needle_end]).replace(" ", "")
        assert needle.startswith("Thepasskey")
        assert needle.count(prompt.key) == 2
        # the text is between instruction and question; other needles shift the depth slightly
        num_filler_tokens = length - 40 * num_keys
        depth_tolerance = (20 + 30 * num_keys) / num_filler_tokens
        assert needle_start / num_filler_tokens == pytest.approx(depth, abs=depth_tolerance)
        question = tokenizer.decode(prompt.tokens[prompt.question_start :]).replace(" ", "")
        assert question.startswith("Whatisthepasskey")
        assert prompt.question_start >= needle_end


def test_needles_are_at_sentence_borders(tokenizer):
    render_haystack, needles = Haystack(tokenizer).render_prompt, [(0.5, "HERE."), (0.9, "THERE.")]
    sentences = ["The grass is green."] * 10
    # the ten sentences have equal lengths, so depth 0.5 is after the fifth sentence
    expected = [*sentences[:5], "HERE.", *sentences[5:9], "THERE.", *sentences[9:]]
    assert " ".join(expected) in render_haystack("", needles, sentences)
    assert "HERE" not in render_haystack("", [], sentences)


@pytest.mark.parametrize(
    "changed_argument", [{"index": 1}, {"depth": 0.25}, {"length": 301}, {"seed": 1}], ids=str
)
def test_prompt_depends_on_length_depth_index_and_seed(tokenizer, changed_argument):
    arguments = {"length": 300, "depth": 0.5, "index": 0, "seed": 0}
    prompt = Haystack(tokenizer).make_prompt(**arguments)
    assert Haystack(tokenizer).make_prompt(**arguments) == prompt
    assert Haystack(tokenizer).make_prompt(**{**arguments, **changed_argument}).key != prompt.key


def test_samples_start_at_different_sentences(tokenizer, text_file):
    for haystack in (Haystack(tokenizer), Haystack(tokenizer, "text", file=text_file)):
        prompt_starts = {haystack.make_prompt(300, 1.0, index).tokens[:30] for index in range(12)}
        assert len(prompt_starts) > 2


def test_hide_needle_removes_keys_only(tokenizer):
    haystack = Haystack(tokenizer, num_keys=4)
    prompt_with_needle, prompt_without_needle = (
        haystack.make_prompt(400, 0.5, 0, hide_needle=hide_needle) for hide_needle in (False, True)
    )
    assert prompt_without_needle.key == prompt_with_needle.key
    assert prompt_without_needle.needle_span is None
    text = tokenizer.decode(prompt_without_needle.tokens).replace(" ", "")
    assert not any(character.isdigit() for character in text)
    # a needle has two sentences with the key, and the sentence "Remember it."
    assert len(prompt_with_needle.tokens) - len(prompt_without_needle.tokens) == 4 * len(
        tokenizer(needles.KEY_STATEMENT_TEMPLATE.format(whose=" for Bob", key="12345"))["input_ids"]
    )


def test_keys_are_distinct_from_distractors(tokenizer):
    haystack = Haystack(tokenizer, "distractors", num_keys=8)
    prompt_text = tokenizer.decode(haystack.make_prompt(1200, 0.5, 0).tokens).replace(" ", "")
    sorted_name_counts = sorted(
        prompt_text.count(f"passkeyfor{name}is") for name in needles.PERSON_NAMES
    )
    # each of 8 names occurs in its needle; the name of the asked key also starts the answer
    assert sorted_name_counts[-9:] == [0, 1, 1, 1, 1, 1, 1, 1, 2]
    assert "number" in prompt_text


def test_sentences_keep_their_quotes():
    sentences = ["It rained all day.", "The old town slept!", '"Who goes there?"', "asked nobody."]
    assert needles.split_sentences(PROSE_TEXT) == [*sentences, "So it was, and so."]


def test_answers_are_scored_by_exact_number():
    for answer in ("48213.", " The key is 48213, not 11111", "7 times: 48213"):
        assert is_right_answer(answer, "48213")
    for answer in ("11111 or 48213", "48214", "482133", "4821", "48 213", ""):
        assert not is_right_answer(answer, "48213")


def test_depths_are_parsed_as_count_or_list():
    assert passkey.parse_depths("5") == (0, 0.25, 0.5, 0.75, 1)
    assert passkey.parse_depths("0.1,1") == (0.1, 1.0)


def test_passkey_command_asks_all_methods_the_same_prompts(model_folder, tmp_path):
    # queries of a dense tail would attend to keys outside of the window of streaming
    options = ("--cab", "dense_tail_blocks=0", "--controls", "1", "--trust-remote-code")
    methods = ["dense", "cab", *MATCHED_METHODS]
    results = run_eval_and_read_results(
        "passkey",
        model_folder,
        tmp_path,
        command_options=options,
        methods=",".join(methods),
        should_draw_figure=True,
    )
    assert {path.name for path in tmp_path.iterdir()} == RESULT_FILE_NAMES
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == [*methods, "full", "no_needle"]
    for row in rows.values():
        assert (row["length"], row["keys"], row["n"], row["stage"]) == (
            PROMPT_TOKENS,
            1,
            3,
            "prefill",
        )
        assert row["low"] <= row["accuracy"] <= row["high"]
    assert rows["full"]["same"] == 3
    assert rows["full"]["density"] == rows["dense"]["density"] == 1.0
    for name in MATCHED_METHODS:
        assert rows[name]["budget"] == pytest.approx(rows["cab"]["density"])
        # published has blocks of 64 tokens, so the density of a short prompt has coarse steps
        tolerance = 0.15 if name == "published" else 0.05
        assert rows[name]["density"] == pytest.approx(rows[name]["budget"], abs=tolerance)
    assert rows["streaming"]["outside_n"] == 2
    settings = results["provenance"]["settings"]
    assert (settings["model"], settings["trust_remote_code"]) == (model_folder.name, True)
    assert "--trust-remote-code True" in (tmp_path / "report.md").read_text()
    assert str(tmp_path) not in json.dumps(results)
    questions_by_depth = {}
    for sample in read_log(tmp_path / "samples.jsonl")[1]:
        question = (sample["expected"], tuple(sample["needle"] or ()), sample["tokens"])
        if sample["method"] != "no_needle":
            questions_by_depth.setdefault(sample["depth"], set()).add(question)
    assert [len(questions) for questions in questions_by_depth.values()] == [1, 1, 1]


def test_stage_both_uses_sparse_decode(model_folder, tmp_path, monkeypatch):
    decode_choices, original_attend = [], decode.attend

    def record_choice_and_attend(q, k, v, choice, **options):
        decode_choices.append(choice)
        return original_attend(q, k, v, choice, **options)

    monkeypatch.setattr(decode, "attend", record_choice_and_attend)
    for stage in ("prefill", "both"):
        options = ("--stage", stage, "--budget", "0.3")
        run_folder = tmp_path / stage
        results = run_eval_and_read_results(
            "passkey",
            model_folder,
            run_folder,
            command_options=options,
            methods="cab,random,streaming",
        )
        # each step has one call for each of the two layers
        assert bool(decode_choices) == (stage == "both") and len(decode_choices) % 2 == 0
    # an eighth of this short sequence has fewer keys than the sinks and local tokens together
    num_keys = torch.cat([choice.counts.flatten() for choice in decode_choices])
    assert PROMPT_TOKENS // 8 < SINK_TOKENS + LOCAL_TOKENS and set(num_keys.tolist()) == {
        SINK_TOKENS + LOCAL_TOKENS
    }
    assert "decoded" not in (tmp_path / "prefill" / "report.md").read_text()
    table_lines = Passkey.tables(results["rows"])["Accuracy"].splitlines()[2:]
    decoding_column = [line.strip("| ").split(" | ")[-1] for line in table_lines]
    # the lines are those of cab, streaming and random
    assert decoding_column == ["sparsely", "sinks and window", "densely"]


# fields of a model's generation config, all of which passkey replaces
GENERATION_FIELDS = {
    "logits": {
        **{"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "guidance_scale": 5.0},
        **{"encoder_repetition_penalty": 9.0, "encoder_no_repeat_ngram_size": 1},
        **{"suppress_tokens": list(range(2, 60)), "sequence_bias": [[[9], 99.0]]},
        **{"begin_suppress_tokens": list(range(2, 90))},
        **{"bad_words_ids": [[token_id] for token_id in range(2, 90)]},
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
def run_and_read_answers(model_folder, tmp_path_factory):
    """Return a function that runs passkey with fields added to the model's generation config.

    The function returns the model's answers.
    """

    def run_and_read_answers(**generation_fields):
        copied_model_folder = shutil.copytree(
            model_folder, tmp_path_factory.mktemp("own") / "model"
        )
        generation_config = {"eos_token_id": 1, "pad_token_id": 1, **generation_fields}
        (copied_model_folder / "generation_config.json").write_text(json.dumps(generation_config))
        run_eval_and_read_results(
            "passkey", copied_model_folder, copied_model_folder.parent / "run", methods="dense"
        )
        return [
            sample["answer"]
            for sample in read_log(copied_model_folder.parent / "run" / "samples.jsonl")[1]
        ]

    return run_and_read_answers


@pytest.fixture(scope="module")
def default_answers(run_and_read_answers):
    """Return the model's answers without additional fields in its generation config."""
    return run_and_read_answers()


@pytest.mark.parametrize("generation_fields", GENERATION_FIELDS.values(), ids=GENERATION_FIELDS)
def test_generation_config_does_not_change_greedy_answers(
    run_and_read_answers, default_answers, generation_fields
):
    assert run_and_read_answers(**generation_fields) == default_answers and all(default_answers)


def test_interrupted_greedy_generation_restores_config(model_folder):
    model, _ = models.load_model(str(model_folder), "cpu", "float32")
    original_config = model.generation_config
    with pytest.raises(KeyboardInterrupt), models.use_greedy_generation(model, 8):
        raise KeyboardInterrupt
    assert model.generation_config is original_config
