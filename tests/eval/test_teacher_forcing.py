"""Teacher-forced scores, compared with calculations by hand and with one forward pass."""

import math
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from long_runs import run_eval_and_read_results
from tiny import SPARSE_CONFIG as SMALL_BLOCKS
from tiny import draw_token_ids, make_tiny_model
from torch.nn import functional as F
from words import CHAT_TEMPLATE, make_tokenizer

import cab_hf
from cab_hf.data.needles import NOISE_SENTENCES, QUESTION_TEMPLATE
from cab_hf.data.tasks import TASKS
from cab_hf.eval import fidelity, teacher_forcing
from cab_hf.eval.fidelity import Fidelity, Settings
from cab_hf.eval.haystack import Haystack
from cab_hf.eval.kv_cache import (
    CACHE_ARGUMENT,
    OLD_CACHE_ARGUMENT,
    get_cache,
    get_cache_name,
    read_with_cache,
)
from cab_hf.eval.teacher_forcing import (
    Reading,
    append_key,
    compare_log_probs,
    compute_nll,
    predict_log_probs,
    predict_turns,
    score_greedy_predictions,
)


def make_fake_model(logits):
    """Return a fake model whose logits are [length, vocabulary] ``logits`` for every input."""

    def run_fake_model(ids, logits_to_keep, use_cache):
        return SimpleNamespace(logits=logits[None, logits_to_keep])

    run_fake_model.device = "cpu"
    return run_fake_model


@pytest.mark.parametrize(
    ("predictions", "is_answer_right"),
    [
        pytest.param([0, 1, 2, 3, 4, 5, 6, 7], [True, True], id="all tokens"),
        pytest.param([0, 1, 2, 9, 4, 5, 6, 7], [False, True], id="last token of an answer"),
        pytest.param([0, 9, 2, 3, 4, 9, 6, 7], [False, False], id="first tokens of both answers"),
        pytest.param([9, 1, 2, 3, 9, 5, 6, 9], [True, True], id="tokens outside of answers"),
    ],
)
def test_answer_is_correct_if_all_tokens_match(predictions, is_answer_right):
    # the logits at position i - 1 predict token i
    model = make_fake_model(F.one_hot(torch.tensor([*predictions[1:], 0]), 20).float())
    reading = Reading(tuple(range(8)), ((1, 4), (5, 7)))
    assert score_greedy_predictions(model, reading) == {"right": is_answer_right}


def test_perplexity_covers_the_second_half(monkeypatch):
    monkeypatch.setattr(teacher_forcing, "MAX_FLOAT32_POSITIONS", 3)
    logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(0))
    result = compute_nll(make_fake_model(logits), Reading(tuple(range(9)), ((4, 9),)))
    log_probabilities = logits.log_softmax(-1)
    expected = -sum(log_probabilities[i - 1, i].item() for i in range(4, 9))
    assert result["count"] == 5
    assert result["nll"] == pytest.approx(expected)


def test_divergence_by_hand():
    """The distributions over three tokens differ at the first of two positions.

    KL([1/2, 1/4, 1/4] || [1/4, 1/2, 1/4]) = 1/2 log 2 - 1/4 log 2.
    """
    dense_log_probs = torch.tensor([[2.0, 1, 1], [1, 1, 2]]).div(4).log()
    actual_log_probs = torch.tensor([[1.0, 2, 1], [1, 1, 2]]).div(4).log()
    divergence = compare_log_probs(actual_log_probs, dense_log_probs, Reading((0, 1, 2), ((1, 3),)))
    assert divergence["kl"] == pytest.approx(math.log(2) / 4)
    assert (divergence["agree"], divergence["count"]) == (1, 2)
    # log-probabilities of the next tokens 1 and 2
    assert divergence["nll"] == pytest.approx(math.log(2) + math.log(2))
    assert (
        compare_log_probs(dense_log_probs, dense_log_probs, Reading((0, 1, 2), ((1, 3),)))["kl"]
        == 0
    )


def make_model_and_tokens(length):
    """Return a tiny model and ``length`` random tokens."""
    return make_tiny_model(num_hidden_layers=2), tuple(draw_token_ids(1, length)[0].tolist())


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_continuation_logits_equal_one_pass(chunk_tokens):
    (model, tokens), scored_ranges = make_model_and_tokens(90), ((50, 51), (60, 90))
    one_pass_log_probs = predict_log_probs(model, Reading(tokens, scored_ranges))
    continued_log_probs = predict_log_probs(
        model, Reading(tokens, scored_ranges, prompt_length=50), chunk=chunk_tokens
    )
    torch.testing.assert_close(continued_log_probs, one_pass_log_probs, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="must be after the prompt of 70 tokens, got 50"):
        predict_log_probs(model, Reading(tokens, scored_ranges, prompt_length=70))


def test_prompt_is_prefilled_in_chunks():
    model, tokens = make_model_and_tokens(290)
    # every row keeps half of its blocks. The blocks have similar masses, so that small changes of q
    # or k select other blocks
    cab_hf.apply_cab(model, SMALL_BLOCKS, mass_threshold=0.0, max_density=0.5)
    reading = Reading(tokens, ((260, 290),), prompt_length=256)
    one_pass_log_probs, whole_block_log_probs, split_block_log_probs = (
        predict_log_probs(model, reading, chunk=7, prefill_chunk=prefill_chunk)
        for prefill_chunk in (0, 64, 80)
    )
    # chunks of 80 tokens split query blocks of 32 tokens, and each part selects its own key blocks
    torch.testing.assert_close(whole_block_log_probs, one_pass_log_probs, atol=1e-4, rtol=1e-4)
    assert (split_block_log_probs - one_pass_log_probs).abs().max() > 1e-3


@pytest.mark.parametrize("prefill_chunk", [0, 32])
def test_turn_logits_equal_one_pass(prefill_chunk):
    model, tokens = make_model_and_tokens(190)
    reading = Reading(tokens, ((60, 75), (110, 111), (180, 190)))
    expected = predict_log_probs(model, reading)
    actual = predict_turns(model, reading, 7, prefill_chunk=prefill_chunk).log_softmax(-1)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_turns_share_one_cache():
    """Record a pair for each call of the model: its number of tokens, and of cached tokens."""
    (model, tokens), recorded_calls = make_model_and_tokens(50), []

    def record_call(model, args, kwargs):
        cache = kwargs[get_cache_name(model)]
        recorded_calls.append((args[0].shape[1], cache.get_seq_length() if cache else 0))

    model.register_forward_pre_hook(record_call, with_kwargs=True)
    predict_turns(model, Reading(tokens, ((18, 20), (45, 50))), 3)
    assert recorded_calls == [(18, 0), (2, 18), (25, 20), (3, 45), (2, 48)]


@pytest.mark.parametrize("length", [8192, 901])
def test_turns_divide_sequence_into_equal_parts(length):
    scored_ranges = fidelity.find_turn_ends(length)
    turn_ends = [0, *(stop for _, stop in scored_ranges)]
    turn_lengths = {stop - start for start, stop in pairwise(turn_ends)}
    assert turn_lengths <= {length // 5, length // 5 + 1} and turn_ends[-1] == length
    # at most 256 tokens of a turn, and at most an eighth of the turn
    assert {stop - start for start, stop in scored_ranges} == {min(256, length // 5 // 8)}


@pytest.mark.parametrize("chat_template", [None, CHAT_TEMPLATE], ids=["plain", "chat"])
@pytest.mark.parametrize(
    ("num_keys", "question_first"),
    [(1, False), (1, True), (4, False)],
    ids=["one key", "question first", "four keys"],
)
def test_key_follows_prompt(chat_template, num_keys, question_first):
    tokenizer = make_tokenizer(chat_template)
    prompt = Haystack(tokenizer, num_keys=num_keys, question_first=question_first).make_prompt(
        300, 0.5, 0
    )
    reading = append_key(tokenizer, prompt)
    ((start, end),) = reading.predicted_ranges
    assert reading.tokens[:start] == prompt.tokens and end == len(reading.tokens)
    assert tokenizer.decode(reading.tokens[start:]).replace(" ", "") == prompt.key
    text = tokenizer.decode(prompt.tokens)
    assert text.replace(" ", "").endswith(prompt.answer_start.replace(" ", ""))
    assert text.count("Remember it") == num_keys
    if num_keys == 1:
        question = QUESTION_TEMPLATE.format(whose="").strip("?")
        assert text.count(question) == 1 + question_first
        assert tokenizer.decode(prompt.tokens[prompt.question_start :]).startswith(question)
        assert (text.index(question) < text.index("The pass key")) == question_first


def test_multi_key_asks_for_one_key(model_folder, tmp_path):
    options = ("--probes", "pass,multi_key,continuation,asked", "--asked", "0")
    (row,) = run_eval_and_read_results(
        "fidelity", model_folder, tmp_path, command_options=options, methods="dense"
    )["rows"]
    assert row["multi_key"]["n"] == row["pass"]["n"] == 2
    assert "continuation" in row and "asked" not in row


def test_every_task_is_scored(model_folder, tmp_path):
    options = ("--probes", "tasks", "--lengths", 600, "--task-samples", 2)
    results = run_eval_and_read_results(
        "fidelity",
        model_folder,
        tmp_path,
        command_options=options,
        methods="dense,full,no_needle",
        should_draw_figure=True,
    )
    rows = {row["method"]: row for row in results["rows"]}
    # tasks have no needle, so the method no_needle has no rows
    assert list(rows) == ["dense", "full"]
    for name, task in TASKS.items():
        num_answers = len(task.make(make_tokenizer(), NOISE_SENTENCES, 600, 0).answers)
        assert {row[name]["n"] for row in rows.values()} == {2 * num_answers}
        # the method full computes exact attention by other kernels than dense
        assert rows["full"][name]["correct"] == rows["dense"][name]["correct"]
        assert rows["full"][name]["pairs"] == 2 * num_answers and rows["full"][name]["delta"] == 0
    assert rows["full"]["tasks"]["n"] == len(TASKS)


def test_task_probes_are_prompts_with_answers(model_folder):
    options = {"device": "cpu", "lengths": (600,), "probes": ("uuid", "tasks", "pass")}
    experiment = Fidelity(Settings(model=str(model_folder), **options))
    other_tasks = [name for name in TASKS if name != "uuid"]
    assert experiment.settings.probes == ("uuid", *other_tasks, "pass")
    example = TASKS["tracking"].make(make_tokenizer(), NOISE_SENTENCES, 600, index=1, seed=0)
    expected = Reading(example.tokens, example.answers, example.prompt)
    assert experiment.make_reading("noise", 600, "tracking", depth=None, index=1) == expected


class ModelWithNewCacheArgument:
    """A model with the cache argument of new transformers versions. It returns this argument."""

    def forward(self, ids, cache=None, use_cache=None):
        return {CACHE_ARGUMENT: (cache, use_cache)}

    def __call__(self, ids, **options):
        return self.forward(ids, **options)


class ModelWithOldCacheArgument(ModelWithNewCacheArgument):
    """A model with the cache argument of old transformers versions. It returns this argument."""

    def forward(self, ids, past_key_values=None, use_cache=None):
        return {OLD_CACHE_ARGUMENT: (past_key_values, use_cache)}


@pytest.mark.parametrize(
    ("model", "argument_name"),
    [
        (ModelWithNewCacheArgument(), CACHE_ARGUMENT),
        (ModelWithOldCacheArgument(), OLD_CACHE_ARGUMENT),
    ],
)
def test_cache_argument_name_follows_model(model, argument_name):
    assert get_cache_name(model) == argument_name
    assert get_cache(read_with_cache(model, torch.zeros(1, 1), "a cache")) == ("a cache", True)


def test_chunked_prefill_equals_one_pass_without_warnings():
    model, ids = make_tiny_model(), draw_token_ids(1, 12, seed=3)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        first_output = read_with_cache(model, ids[:, :8], None)
        second_output = read_with_cache(model, ids[:, 8:], get_cache(first_output))
    torch.testing.assert_close(second_output.logits, model(ids).logits[:, 8:])
