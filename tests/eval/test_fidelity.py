"""The fidelity command: what it reads, how it scores, its rows, and that it can be resumed."""

import json
import math
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench import DensityBench
from matplotlib.figure import Figure
from tiny import SPARSE as SMALL_BLOCKS
from tiny import SPARSE_WORDS
from torch.nn import functional as F
from words import CHAT, TEXT, make_tokenizer

import cab_hf
from cab_hf.config import CabConfig
from cab_hf.eval import (
    attention_time,
    fidelity,
    fidelity_figure,
    probes,
    teacher_forcing,
)
from cab_hf.eval.__main__ import main
from cab_hf.eval.attention_time import AttentionClock
from cab_hf.eval.fidelity import Fidelity, Settings
from cab_hf.eval.haystack import Haystack
from cab_hf.eval.intervals import mean_interval, mean_of_intervals, paired_difference
from cab_hf.eval.kv_cache import cache_name
from cab_hf.eval.methods import METHODS, last_queries
from cab_hf.eval.methods.blocks import Chosen
from cab_hf.eval.speed.timing import Bench, Timing
from cab_hf.eval.teacher_forcing import (
    TeacherForced,
    answered,
    behind_turns,
    distributions,
    divergence,
    greedy_match,
    nll,
)
from cab_hf.runs.log import read_file, read_log
from cab_hf.texts.needles import NOISE, QUESTION
from cab_hf.texts.tasks import TASKS

LENGTH = 300
SMALL = "query_block=32,key_block=16,mass_threshold=0.06,share_threshold=0.5,dense_tail_blocks=1"
FILES = {"samples.jsonl", "results.json", "results.csv", "report.md", "figure.png"}


@pytest.fixture
def book(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    return str(file)


def start(model_folder, out, *more, methods="dense,cab,random", drawn=False):
    given = ["--model", model_folder, "--out", out, "--methods", methods, "--lengths", LENGTH]
    fixed = ["--keys", "2", "--device", "cpu"]
    fixed += [word for assignment in SPARSE_WORDS for word in ("--cab", assignment)]
    with pytest.MonkeyPatch.context() as patch:
        # which takes longer than the rest
        if not drawn:
            patch.setattr(Fidelity, "draw", lambda *_: None)
        return main(["fidelity", *map(str, (*given, *fixed, *more))])


def command(model_folder, out, *more, **kind):
    assert start(model_folder, out, *more, **kind) == 0
    return json.loads((out / "results.json").read_text())


# --- scoring


def answering(logits):
    """A model whose logits [length, vocabulary] are these, whatever it reads."""

    def model(ids, logits_to_keep, use_cache):
        return SimpleNamespace(logits=logits[None, logits_to_keep])

    model.device = "cpu"
    return model


@pytest.mark.parametrize(
    ("said", "right"),
    [
        pytest.param([0, 1, 2, 3, 4, 5, 6, 7], [True, True], id="all"),
        pytest.param([0, 1, 2, 9, 4, 5, 6, 7], [False, True], id="last digit of the first"),
        pytest.param([0, 9, 2, 3, 4, 9, 6, 7], [False, False], id="first digits"),
        pytest.param([9, 1, 2, 3, 9, 5, 6, 9], [True, True], id="what is not asked"),
    ],
)
def test_an_answer_is_right_when_all_its_tokens_are(said, right):
    # each token is said where the one before it stands
    model = answering(F.one_hot(torch.tensor([*said[1:], 0]), 20).float())
    reading = TeacherForced(tuple(range(8)), ((1, 4), (5, 7)))
    assert greedy_match(model, reading) == {"right": right}


def test_surprise_is_the_likelihood_of_the_second_half(monkeypatch):
    monkeypatch.setattr(teacher_forcing, "LOGITS_AT_ONCE", 3)
    logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(0))
    result = nll(answering(logits), TeacherForced(tuple(range(9)), ((4, 9),)))
    likely = logits.log_softmax(-1)
    assert result["count"] == 5
    assert result["nll"] == pytest.approx(-sum(likely[i - 1, i].item() for i in range(4, 9)))


def test_divergence_by_hand():
    """Two places, three tokens: at the first the method is sure of another one, at the second same.

    KL([1/2, 1/4, 1/4] || [1/4, 1/2, 1/4]) = 1/2 log 2 - 1/4 log 2.
    """
    dense = torch.tensor([[2.0, 1, 1], [1, 1, 2]]).div(4).log()
    actual = torch.tensor([[1.0, 2, 1], [1, 1, 2]]).div(4).log()
    result = divergence(actual, dense, TeacherForced((0, 1, 2), ((1, 3),)))
    assert result["kl"] == pytest.approx(math.log(2) / 4)
    assert (result["agree"], result["count"]) == (1, 2)
    # of what stands there, token 1 and token 2
    assert result["nll"] == pytest.approx(math.log(2) + math.log(2))
    assert divergence(dense, dense, TeacherForced((0, 1, 2), ((1, 3),)))["kl"] == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_what_follows_a_prompt_is_foreseen_as_in_one_pass(model_folder, chunk):
    model = Fidelity(Settings(model=str(model_folder), device="cpu")).model
    tokens = tuple(torch.randint(3, 60, (90,), generator=torch.Generator().manual_seed(0)).tolist())
    spans = ((50, 51), (60, 90))
    complete = distributions(model, TeacherForced(tokens, spans))
    behind = distributions(model, TeacherForced(tokens, spans, prompt=50), chunk=chunk)
    torch.testing.assert_close(behind, complete, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="must be behind the prompt of 70; got 50"):
        distributions(model, TeacherForced(tokens, spans, prompt=70))


def test_a_prompt_is_read_in_chunks(model_folder):
    experiment = Fidelity(Settings(model=str(model_folder), device="cpu", prefill_chunk=64))
    # the best half of every row, where attention hardly differs from block to block
    half = {"mass_threshold": 0.0, "max_density": 0.5}
    model = cab_hf.apply_cab(experiment.model, SMALL_BLOCKS, **half)
    generator = torch.Generator().manual_seed(0)
    tokens = tuple(torch.randint(3, 60, (290,), generator=generator).tolist())
    text = TeacherForced(tokens, ((260, 290),), prompt=256)
    complete, blocks, others = (
        distributions(model, text, chunk=7, prefill_chunk=each) for each in (0, 64, 80)
    )
    # 32 queries a block: where chunks end inside of one, it chooses by fewer of them
    torch.testing.assert_close(blocks, complete, atol=1e-4, rtol=1e-4)
    assert (others - complete).abs().max() > 1e-3


@pytest.mark.parametrize("prefill_chunk", [0, 32])
def test_turns_are_foreseen_as_in_one_pass(model_folder, prefill_chunk):
    model = Fidelity(Settings(model=str(model_folder), device="cpu")).model
    tokens = tuple(
        torch.randint(3, 60, (190,), generator=torch.Generator().manual_seed(0)).tolist()
    )
    reading = TeacherForced(tokens, ((60, 75), (110, 111), (180, 190)))
    expected = distributions(model, reading)
    actual = behind_turns(model, reading, 7, prefill_chunk=prefill_chunk).log_softmax(-1)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_every_turn_is_read_behind_those_before_it(model_folder):
    """The method reads the prompts of all turns over one cache, and what follows them is exact."""
    model, calls = Fidelity(Settings(model=str(model_folder), device="cpu")).model, []

    def look(model, given, more):
        cached = more[cache_name(model)]
        calls.append((given[0].shape[1], cached.get_seq_length() if cached else 0))

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    behind_turns(model, TeacherForced(tuple(range(3, 53)), ((18, 20), (45, 50))), 3)
    hook.remove()
    assert calls == [(18, 0), (2, 18), (25, 20), (3, 45), (2, 48)]


@pytest.mark.parametrize("length", [8192, 901])
def test_turns_are_equal_and_end_with_the_text(length):
    spans = fidelity.turn_ends(length)
    ends = [0, *(stop for _, stop in spans)]
    assert {b - a - length // 5 for a, b in pairwise(ends)} <= {0, 1} and ends[-1] == length
    # 256 tokens, an eighth of a turn at most
    assert {stop - start for start, stop in spans} == {min(256, length // 5 // 8)}


@pytest.mark.parametrize("chat", [None, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize(
    ("keys", "question_first"),
    [
        pytest.param(1, False, id="one key"),
        pytest.param(1, True, id="question first"),
        pytest.param(4, False, id="four keys"),
    ],
)
def test_the_key_stands_behind_its_prompt(chat, keys, question_first):
    tokenizer = make_tokenizer(chat)
    prompt = Haystack(tokenizer, keys=keys, question_first=question_first).prompt(LENGTH, 0.5, 0)
    reading = answered(tokenizer, prompt)
    ((start, end),) = reading.spans
    assert reading.tokens[:start] == prompt.tokens and end == len(reading.tokens)
    assert tokenizer.decode(reading.tokens[start:]).replace(" ", "") == prompt.key
    text = tokenizer.decode(prompt.tokens)
    assert text.replace(" ", "").endswith(prompt.begun.replace(" ", ""))
    assert text.count("Remember it") == keys
    if keys == 1:
        question = QUESTION.format(whose="").strip("?")
        assert text.count(question) == 1 + question_first
        assert tokenizer.decode(prompt.tokens[prompt.asking :]).startswith(question)
        assert (text.index(question) < text.index("The pass key")) == question_first


def test_of_several_keys_one_is_asked_for_and_of_none_nothing(model_folder, tmp_path):
    more = ("--probes", "pass,multi_key,continuation,asked", "--asked", "0")
    (row,) = command(model_folder, tmp_path, *more, methods="dense")["rows"]
    assert row["multi_key"]["n"] == row["pass"]["n"] == 2
    assert "continuation" in row and "asked" not in row


def test_every_task_is_read(model_folder, tmp_path):
    more = ("--probes", "tasks", "--lengths", 600, "--task-samples", 3)
    results = command(model_folder, tmp_path, *more, methods="dense,full,no_needle", drawn=True)
    rows = {row["method"]: row for row in results["rows"]}
    # no_needle has nothing to hide here
    assert list(rows) == ["dense", "full"]
    for name, task in TASKS.items():
        answers = len(task.make(make_tokenizer(), NOISE, 600, 0).answers)
        assert {row[name]["n"] for row in rows.values()} == {3 * answers}
        # exact attention by other kernels
        assert rows["full"][name]["correct"] == rows["dense"][name]["correct"]
        assert rows["full"][name]["pairs"] == 3 * answers and rows["full"][name]["delta"] == 0
    assert rows["full"]["tasks"]["n"] == len(TASKS)


def test_tasks_are_read_as_prompts(model_folder):
    given = {"device": "cpu", "lengths": (600,), "probes": ("uuid", "tasks", "pass")}
    measured = Fidelity(Settings(model=str(model_folder), **given))
    assert measured.settings.probes == ("uuid", *(n for n in TASKS if n != "uuid"), "pass")
    example = TASKS["tracking"].make(make_tokenizer(), NOISE, 600, 1, 0)
    expected = TeacherForced(example.tokens, example.answers, example.prompt)
    assert measured.reading("noise", 600, "tracking", None, 1) == expected


# --- settings


def test_configurations_are_told_apart(tmp_path):
    plain, complete = tmp_path / "plain.json", tmp_path / "whole.json"
    plain.write_text(json.dumps({"mass_threshold": 0.7}))
    complete.write_text(
        json.dumps({"cab_config": CabConfig(mass_threshold=0.6).to_dict(), "other": 1})
    )
    several = tmp_path / "several.yaml"
    several.write_text("d: {mass_threshold: 0.4}\ne:\n  mass_threshold: 0.3\n  dense_layers: [1]\n")
    parts = ("a=mass_threshold=0.8,dense_layers=(0,2),engine=gather", f"b={plain}", f"c={complete}")
    parts += (str(several),)
    settings = Settings(variant=parts, cab=("mass_threshold=0.5",))
    configs = settings.configs
    masses = {"cab": 0.5, "cab:a": 0.8, "cab:b": 0.7, "cab:c": 0.6, "cab:d": 0.4, "cab:e": 0.3}
    assert {name: config.mass_threshold for name, config in configs.items()} == masses
    assert (configs["cab:a"].dense_layers, configs["cab:a"].engine) == ((0, 2), "gather")
    assert configs["cab:e"].dense_layers == (1,)
    assert {config.min_length for config in configs.values()} == {0}
    recorded = Fidelity(settings).recorded()
    assert recorded["variant"][1:] == ["b=plain.json", "c=whole.json", "several.yaml"]
    assert str(tmp_path) not in json.dumps(recorded)


def test_the_variants_of_the_examples_are_configurations():
    file = Path(__file__).parents[2] / "examples" / "variants.yaml"
    configs = Settings(variant=(str(file),)).configs
    assert len(configs) == 10 and configs["cab:rows-128-keys"].key_block == 128
    assert {config.predictor for name, config in configs.items() if name != "cab"} == {"rows"}


# --- the command


def test_the_command_writes_its_files(model_folder, tmp_path, book, capsys):
    more = ("--texts", f"noise,{book}", "--budgets", "match,0.5", "--variant", f"wide={SMALL}")
    results = command(model_folder, tmp_path / "out", *more)
    rows = results["rows"]
    arms = [*((name, None) for name in ("dense", "cab", "cab:wide")), ("random", "match")]
    arms += [("random", 0.5)]
    cells = [(row["text"], row["method"], row["budget"]) for row in rows]
    assert cells == [(text, *arm) for text in ("noise", "book") for arm in arms]
    for dense, cab, wide, matched, half in (rows[:5], rows[5:]):
        assert dense["density"] == 1
        # times of a CPU mean nothing
        assert dense["attend_ms"] is cab["over_dense"] is None
        assert cab["density"] < wide["density"] < 1
        assert matched["fitted"] == pytest.approx(cab["density"])
        assert matched["density"] == pytest.approx(cab["density"], abs=0.05)
        assert half["density"] == pytest.approx(0.5, abs=0.05)
        for row in (cab, wide, matched, half):
            assert (row["pass"]["n"], row["recall"]["n"], row["recall"]["pairs"]) == (2, 2, 2)
            assert row["perplexity"]["ratio"] > 0
    assert str(tmp_path) not in json.dumps(results)
    noise, file = results["provenance"]["settings"]["texts"]
    assert (noise, file["name"]) == ("noise", "book.txt")
    assert "On book, 300 tokens, cab attends" in capsys.readouterr().out


def test_borders_are_read_beside_the_rest(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "BORDER", 32)
    asked = ("--probes", "pass,recall,recall_border,perplexity,perplexity_border")
    results = command(model_folder, tmp_path, *asked, methods="dense,full,cab,no_needle")
    rows = {row["method"]: row for row in results["rows"]}
    # documents have no needle to hide
    hidden = rows.pop("no_needle")
    assert "pass" in hidden and "recall" not in hidden
    # tokens 160, 192, 224, 256 and 288
    assert rows["dense"]["perplexity_border"]["tokens"] == 5
    for row in rows.values():
        assert row["recall_border"]["n"] == row["recall"]["n"] == 2
    full = rows["full"]
    assert full["density"] == 1
    assert full["recall"]["share"] == rows["dense"]["recall"]["share"]
    for probe in ("perplexity", "perplexity_border"):
        assert full[probe]["ratio"] == pytest.approx(1, abs=1e-5)
    assert rows["cab"]["perplexity_border"]["ratio"] != pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("probe", ["recall", "recall_border"])
def test_only_at_borders_nothing_behind_takes_part(model_folder, monkeypatch, probe):
    monkeypatch.setattr(probes, "BORDER", 32)
    third = (*SPARSE_WORDS, "mass_threshold=0", "max_density=0.3")
    given = {"device": "cpu", "lengths": (900,), "keys": 2, "cab": third, "methods": ("cab",)}
    measured = Fidelity(Settings(model=str(model_folder), **given))
    reading = measured.reading("noise", 900, probe, None, 0)
    case = {"method": "cab", "text": "noise", "length": 900, "budget": None, "fitted": None}

    def before(tokens, at):
        with measured.method(case).applied(measured.model):
            return teacher_forcing.predictions(
                measured.model, TeacherForced(tokens, ((at, at + 1),))
            )

    changes = 0
    for at, _ in reading.spans:
        others = reading.tokens[:at] + tuple(reversed(reading.tokens[at:]))
        changes += not torch.equal(before(reading.tokens, at), before(others, at))
    assert (changes > 0) == (probe == "recall")


BEHIND = ("--probes", "continuation,asked", "--lengths", 900, "--documents", 2, "--asked", 2)


def test_what_follows_a_prompt_is_held_against_dense(model_folder, tmp_path):
    results = command(
        model_folder, tmp_path, *BEHIND, "--budgets", "0.05", methods="dense,full,cab,streaming"
    )
    rows = {row["method"]: row for row in results["rows"]}
    behind = {name: row["continuation"] for name, row in rows.items()}
    # an eighth of 900 tokens, of two documents
    assert {result["tokens"] for result in behind.values()} == {2 * 112}
    assert (behind["dense"]["kl"], behind["dense"]["agreement"]) == (0, 1)
    assert "ratio" not in behind["dense"]
    assert behind["full"]["kl"] == pytest.approx(0, abs=1e-7)
    assert behind["full"]["ratio"] == pytest.approx(1, abs=1e-5)
    # a window behind which everything is gone
    assert behind["streaming"]["kl"] > behind["cab"]["kl"] > 10 * abs(behind["full"]["kl"])
    for actual in behind.values():
        assert 0 <= actual["kl_low"] <= max(actual["kl"], 0) <= actual["kl_high"]
    assert {row["asked"]["n"] for row in rows.values()} == {4}


TURNS = ("--probes", "turns", "--lengths", 900, "--documents", 2)
TIGHT = "tiny=query_block=32,key_block=16,dense_tail_blocks=1,max_density=0.05"


def test_turns_are_held_against_dense(model_folder, tmp_path):
    more = ("--budgets", "0.05", "--variant", TIGHT, "--cab", "mass_threshold=0.2")
    results = command(
        model_folder, tmp_path, *TURNS, *more, methods="dense,full,cab,random,streaming", drawn=True
    )
    rows = {row["method"]: row for row in results["rows"]}
    turns = {name: row["turns"]["turns"] for name, row in rows.items()}
    # an eighth of 180 tokens, of two documents
    assert {turn["tokens"] for each in turns.values() for turn in each} == {2 * 22}
    assert {len(each) for each in turns.values()} == {5}
    assert {(turn["kl"], turn["agreement"]) for turn in turns["dense"]} == {(0, 1)}
    for at, turn in enumerate(turns["full"]):
        assert turn["kl"] == pytest.approx(0, abs=1e-7) and turn["agreement"] == 1
        for name in ("cab", "cab:tiny", "random", "streaming"):
            assert turns[name][at]["kl"] > 10 * abs(turn["kl"])
    assert rows["cab"]["density"] < 0.6
    for row in rows.values():
        result = row["turns"]
        assert result["kl"] == pytest.approx(sum(turn["kl"] for turn in result["turns"]) / 5)
        expected = result["turns"][-1]["kl"] - result["turns"][0]["kl"]
        assert result["growth"] == pytest.approx(expected)
        assert result["growth_low"] <= result["growth"] <= result["growth_high"]


def test_what_follows_a_prompt_is_read_exactly_but_by_what_has_no_keys_left(model_folder):
    given = {"device": "cpu", "lengths": (900,), "cab": SPARSE_WORDS, "methods": ("cab",)}
    measured = Fidelity(Settings(model=str(model_folder), **given))
    reading = measured.reading("noise", 900, "continuation", None, 0)
    assert reading.prompt == 900 - 112
    place = {"text": "noise", "length": 900, "index": 0, "probe": "continuation", "fitted": 0.1}
    likely = {}
    for name in ("cab", "streaming"):
        case = {"method": name, "budget": None, **place}
        method = measured.method(case)
        with method.applied(measured.model):
            # nothing but its cache makes a method forget what it has read
            complete = distributions(measured.model, reading, chunk=measured.settings.chunk)
            measured.dense_of(case)
            likely[name] = measured.read(case, reading, method)["nll"]
        exact = -complete[range(112), list(reading.tokens[788:])].sum().item()
        assert (likely[name] == pytest.approx(exact, abs=1e-3)) == (name == "cab")


# 4 times 128 tokens have room in 900
DECODING = (
    *("--probes", "decode,decode_asked,greedy", "--lengths", 900, "--documents", 2, "--asked", 2),
    *("--decoded", 24, "--written", 16, "--continuations", 3, "--match", "cab:sparse"),
    *("--variant", f"sparse={SMALL},sparse_decode=true,decode_tokens=128"),
)


def test_decoding_is_held_against_dense(model_folder, tmp_path):
    more, methods = ("--variant", f"dense={SMALL}"), "dense,full,streaming,h2o,snapkv"
    results = command(model_folder, tmp_path, *DECODING, *more, methods=methods, drawn=True)
    rows = {row["method"]: row for row in results["rows"]}
    caches = ("streaming", "h2o", "snapkv")
    assert list(rows) == ["dense", "cab:sparse", "cab:dense", *caches, "full"]
    # the index has 16 channels in half a byte and a scale of two, keys and values 32 in four
    kept = {
        "cab:dense": 900,
        "dense": 900,
        "full": 900,
        "cab:sparse": 128 + 900 * 10 / 128,
        **dict.fromkeys(caches, 198),
    }
    assert {name: row["step_tokens"] for name, row in rows.items()} == kept
    assert {row["decode"]["tokens"] for row in rows.values()} == {2 * 24}
    assert {row["decode_asked"]["n"] for row in rows.values()} == {4}
    assert {row["greedy"]["n"] for row in rows.values()} == {3}
    decode = {name: row["decode"] for name, row in rows.items()}
    assert (decode["dense"]["kl"], decode["dense"]["agreement"]) == (0, 1)
    assert decode["full"]["kl"] == pytest.approx(0, abs=1e-7)
    for name in ("cab:sparse", *caches):
        assert decode[name]["kl"] > 1e-6 > abs(decode["full"]["kl"])
    # by one prefill
    assert decode["cab:sparse"]["kl"] != pytest.approx(decode["cab:dense"]["kl"], rel=1e-2)
    assert (rows["full"]["greedy"]["equal"], rows["full"]["greedy"]["prefix"]) == (3, 16)
    assert "equal" not in rows["dense"]["greedy"]


def test_texts_that_are_decoded_side_by_side_are_those_decoded_alone(
    model_folder, tmp_path, monkeypatch
):
    together = command(model_folder, tmp_path / "together", *DECODING, methods="dense,h2o")
    # two continuations and documents at once, then one
    monkeypatch.setattr(fidelity, "TOKENS_AT_ONCE", 900)
    alone = command(model_folder, tmp_path / "alone", *DECODING, methods="dense,h2o")
    for one, other in zip(together["rows"], alone["rows"], strict=True):
        assert one["decode"]["kl"] == pytest.approx(other["decode"]["kl"], abs=1e-6)
        assert one["decode_asked"] == other["decode_asked"]
        assert one["greedy"] == other["greedy"]


@pytest.fixture
def kill(monkeypatch):
    """(n) -> the cases that are measured from now on; the n-th is killed."""
    measure = Fidelity.measure

    def kill(n):
        calls = []

        def counted(self, case):
            calls.append(case)
            if len(calls) == n:
                raise KeyboardInterrupt
            return measure(self, case)

        monkeypatch.setattr(Fidelity, "measure", counted)
        return calls

    return kill


@pytest.mark.parametrize(
    ("words", "methods", "at"),
    [
        pytest.param(BEHIND, "dense,cab,random", 6, id="continuations"),
        pytest.param(TURNS, "dense,cab,random", 4, id="turns, the second document of cab"),
        pytest.param(DECODING, "dense", 2, id="decoding, the second of two read together"),
    ],
)
def test_a_killed_run_ends_as_a_whole_one(model_folder, tmp_path, kill, words, methods, at):
    complete = command(model_folder, tmp_path / "whole", *words, methods=methods)
    kill(at)
    with pytest.raises(KeyboardInterrupt):
        command(model_folder, tmp_path / "killed", *words, methods=methods)
    resumed = command(model_folder, tmp_path / "killed", *words, methods=methods)
    assert resumed["rows"] == complete["rows"]


# --- time


class CountingBench(Bench):
    """Says that a call took as many ms as calls came before it."""

    def __init__(self):
        super().__init__("cpu")
        self.calls = 0

    def time(self, call, graph=True):
        call()
        self.calls += 1
        return Timing(float(self.calls))


def test_layers_are_timed_apart_and_summed(model_folder):
    model = Fidelity(Settings(model=str(model_folder), device="cpu")).model
    clock, tokens = AttentionClock(CountingBench()), tuple(range(3, 63)) * 10
    dense = clock.time(model, tokens, None)
    # one shape is measured once, and there are two layers
    assert dense == {"predict_ms": 0.0, "attend_ms": 2.0, "dense_ms": 2.0, "dense_kernel": "SDPA"}
    config = CabConfig(min_length=0, query_block=32, key_block=16)
    result = clock.time(model, tokens, config)
    assert (result["predict_ms"], result["attend_ms"], result["dense_ms"]) == (2 + 4, 3 + 5, 2)
    # an exact layer takes what dense attention does
    result = clock.time(model, tokens, CabConfig(min_length=0, dense_layers=(0,)))
    assert (result["predict_ms"], result["attend_ms"]) == (6, 1 + 7)
    cascade = CabConfig(min_length=0, predictor="cascade", anchors=(0,))
    assert clock.time(model, tokens, cascade)["dense_ms"] == 2
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param("xattention", 9.3 / 73.8, id="reported"),
        pytest.param("streaming", 0.0, id="in favour"),
        pytest.param("rows", None, id="measured"),
    ],
)
def test_what_choosing_takes_is_what_authors_report(name, share, model_folder):
    model = Fidelity(Settings(model=str(model_folder), device="cpu")).model
    config = CabConfig(min_length=0, query_block=32, key_block=16, predictor=name)
    result = AttentionClock(CountingBench()).time(model, tuple(range(3, 63)) * 10, config)
    assert result.get("predict_reported") == share
    if share is None:
        assert result["predict_ms"] == 2 + 4
    else:
        # dense attention is measured once and counts for both layers
        assert result["predict_ms"] == pytest.approx(share * 2)
        assert result["attend_ms"] == 2 + 3


def test_all_that_chooses_without_a_kernel_has_a_share():
    rivals = {method.predictor for method in METHODS.values() if issubclass(method, Chosen)}
    rivals |= {"streaming"}
    assert set(attention_time.REPORTED) == rivals


def test_times_stand_beside_quality(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "layer_bench", lambda device: CountingBench())
    results = command(model_folder, tmp_path, "--probes", "continuation", drawn=True)
    dense, cab, random = results["rows"]
    assert dense["over_dense"] == 1
    assert cab["over_dense"] == (cab["predict_ms"] + cab["attend_ms"]) / cab["dense_ms"]
    assert random["attend_ms"] > 0
    assert (random["predict_ms"], random["predict_reported"]) == (0, 0)


def test_a_cpu_is_not_timed():
    assert attention_time.layer_bench("cpu") is None
    assert Fidelity(Settings(device="cpu")).clock is None
    # but where times are asked for
    assert type(Fidelity(Settings(device="cpu", equal="time")).clock.bench) is Bench


RIVALS = (
    "random,antidiagonal,xattention_fitted,vertical_slash,flexprefill_fitted,mean_pooled,streaming"
)
TIMED = ("--probes", "continuation", "--lengths", "1200", "--equal", "time")


def test_times_are_matched(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fidelity, "layer_bench", lambda device: DensityBench())
    # of which so short a text has too little to leave out
    monkeypatch.setattr(last_queries, "MIN_TOKENS", 32)
    results = command(model_folder, tmp_path, *TIMED, methods=f"dense,cab,{RIVALS}")
    rows = {row["method"]: row for row in results["rows"]}
    cab = rows["cab"]["predict_ms"] + rows["cab"]["attend_ms"]
    for name in RIVALS.split(","):
        row = rows[name]
        assert row["predict_ms"] + row["attend_ms"] == pytest.approx(cab, rel=0.05)
        assert row["over_match"] == pytest.approx(1, abs=0.05)
        assert row["fitted"] == cab
        assert row["continuation"]["n"] == 1
    assert rows["antidiagonal"]["density"] < rows["random"]["density"]
    assert "over_match" not in rows["dense"] and "over_match" not in rows["cab"]


def test_a_time_that_no_budget_takes_is_said():
    row = sample("random", "time", 0, predict_ms=0.0, attend_ms=12.0, dense_ms=20.0)
    rows = Fidelity.rows([{**row, "dense_kernel": "SDPA", "match_ms": 10.0}], {})
    assert rows[0]["over_match"] == 1.2
    assert ["random on noise at 8 tokens (1.20 ×)" in x for x in Fidelity.readings(rows)] == [True]


def test_a_density_that_is_not_the_matched_one_is_said():
    def read(method, density, budget="match", **more):
        fields = {"right": [True], "budget": budget, "fitted": 0.2, **more}
        return sample(method, "recall", 0, **fields | {"density": density})

    samples = [
        # of the layers that are sparse, beside dense ones
        read("random", 0.6, sparse_density=0.21),
        read("streaming", 0.2, sparse_density=0.22),
        read("oracle", 0.3, 0.2, sparse_density=0.3),
        # a cache that keeps some tokens, and one matched by time, in ms
        read("h2o", 0.5, sparse_density=None),
        read("published", 0.3, sparse_density=0.3, fitted_config={}),
    ]
    rows = Fidelity.rows(samples, {})
    assert ["density_over_match" in row for row in rows].count(True) == 2
    (said,) = Fidelity.readings(rows)
    assert said == (
        "The density is not the matched one within 5%: streaming on noise at 8 tokens (1.10 ×), "
        "oracle on noise at 8 tokens and budget 0.2 (1.50 ×)."
    )


def test_rows_of_fewer_cases_than_others_are_named():
    cases = [("dense", "recall", 3), ("dense", "asked", 2), ("cab", "recall", 3)]
    # never asked the other probe, which may be as it was to be
    cases += [("random", "recall", 2), ("oracle", "recall", 1), ("oracle", "asked", 1)]
    samples = [sample(x, probe, i, right=[True]) for x, probe, n in cases for i in range(n)]
    # another text has as many as it has
    rows = Fidelity.rows([*samples, sample("cab", "recall", 0, "other", right=[True])], {})
    marked = {row["method"]: row["fewer"] for row in rows if "fewer" in row}
    assert marked == {
        "random": {"recall": "2 of 3"},
        "oracle": {"recall": "1 of 3", "asked": "1 of 2"},
    }
    assert Fidelity.readings(rows)[-1].endswith(
        "random on noise at 8 tokens (2 of 3), oracle on noise at 8 tokens (1 of 3 or 1 of 2)."
    )


def test_a_killed_run_goes_on_with_what_it_fitted(model_folder, tmp_path, monkeypatch, kill):
    """Though times are others by then."""
    monkeypatch.setattr(fidelity, "layer_bench", lambda device: DensityBench())
    more = (*TIMED, "--probes", "continuation,recall", "--documents", "2")
    # of the third method the second sample
    calls = kill(12)
    with pytest.raises(KeyboardInterrupt):
        command(model_folder, tmp_path, *more)
    assert calls[-1]["method"] == "random"
    monkeypatch.setattr(fidelity, "layer_bench", lambda device: CountingBench())
    command(model_folder, tmp_path, *more)
    ours = [each for each in read_log(tmp_path / "samples.jsonl")[1] if each["method"] == "random"]
    assert ["fitted_config" in each for each in ours] == [True, *[False] * 4]
    assert len({each["density"] for each in ours if each["probe"] == "recall"}) == 1


def test_every_method_is_read(model_folder, tmp_path):
    # some are dense where nothing is decoded
    names = [name for name, method in METHODS.items() if not method.dense_prefill]
    more = ("--probes", "continuation", "--lengths", "600", "--budgets", "0.5")
    rows = command(model_folder, tmp_path, *more, methods=",".join(names))["rows"]
    # no_needle has nothing to hide here
    assert [row["method"] for row in rows] == [name for name in names if name != "no_needle"]
    densities = {row["method"]: row["density"] for row in rows}
    assert densities["mean_pooled"] == pytest.approx(0.5, abs=0.06)


def test_a_killed_run_goes_on_and_grows(model_folder, tmp_path, kill, capsys):
    complete = command(model_folder, tmp_path / "whole")
    killed, calls = tmp_path / "killed", kill(9)
    with pytest.raises(KeyboardInterrupt):
        command(model_folder, killed)
    resumed = command(model_folder, killed)
    # 8 of 3 methods' 8 samples were measured
    assert len(calls) == 9 + 16
    assert resumed["rows"] == complete["rows"]

    grown = command(model_folder, killed, "--documents", "2", methods="dense")
    assert len(calls) == 25 + 4
    assert [row["recall"]["n"] for row in grown["rows"]] == [4, 2, 2]
    assert [case["index"] for case in calls[-4:]] == [1] * 4

    assert start(model_folder, killed, "--variant", f"wide={SMALL}") == 2
    assert "give another --out" in capsys.readouterr().err


# --- rows


def sample(method, probe, index, text="noise", **result):
    place = {"method": method, "text": text, "length": 8, "budget": None, "probe": probe}
    fixed = {"depth": None, "index": index, "fitted": None, "density": 1.0}
    return {**place, **fixed, **result}


def test_a_method_that_was_dense_attention_is_said_to_be():
    samples = [
        sample("dense", "recall", 0, right=[True], sparse_density=None),
        sample("cab", "recall", 0, right=[True], sparse_density=None),
        sample("cab:a", "recall", 0, right=[True], sparse_density=0.3, density=0.3),
    ]
    *_, given = Fidelity.readings(Fidelity.rows(samples, {}))
    assert given.startswith("No layer attended sparsely under cab at 8 tokens:")
    samples[1]["sparse_density"] = 0.2
    assert not any("sparsely" in each for each in Fidelity.readings(Fidelity.rows(samples, {})))
    # a cache that dropped keys behind a dense prefill is not dense attention
    samples[1] |= {"sparse_density": None, "tokens": 8, "step_tokens": 2.0}
    assert not any("sparsely" in each for each in Fidelity.readings(Fidelity.rows(samples, {})))


def test_rows_by_hand():
    samples = [
        sample("dense", "recall", 0, right=[True, True]),
        sample("dense", "recall", 1, right=[True, False]),
        sample("dense", "perplexity", 0, nll=10.0, count=10),
        sample("dense", "perplexity", 1, nll=20.0, count=10),
        sample("cab:a", "recall", 0, right=[True, False], density=0.2),
        sample("cab:a", "perplexity", 0, nll=11.0, count=10, density=0.3),
        sample("cab", "recall", 0, right=[True, False], density=0.1),
        sample("cab", "recall", 1, right=[False, False], density=0.2),
        # dense has read no third document
        sample("cab", "recall", 2, right=[True, True], density=0.3),
        sample("cab", "perplexity", 0, nll=11.0, count=10, density=0.2),
        sample("cab", "perplexity", 1, nll=23.0, count=10, density=0.2),
        sample("cab", "question_first", 0, right=[True], density=0.9),
    ]
    dense, cab, other = rows = Fidelity.rows(samples, {})
    assert [row["method"] for row in rows] == ["dense", "cab", "cab:a"]
    assert "delta" not in dense["recall"]
    assert dense["perplexity"]["value"] == pytest.approx(math.exp(1.5))
    # a question asked twice tells no usual density
    assert cab["density"] == pytest.approx(0.2)
    recall, perplexity = cab["recall"], cab["perplexity"]
    assert (recall["n"], recall["correct"], recall["pairs"]) == (6, 3, 4)
    expected = paired_difference([1, 0, 0, 0], [1, 1, 1, 0])
    assert [recall[name] for name in ("delta", "delta_low", "delta_high")] == list(expected)
    assert recall["ratio"] == pytest.approx(1 / 3)
    interval = map(math.exp, mean_interval([1.1, 2.3], [1.0, 2.0]))
    actual = [perplexity[name] for name in ("ratio", "ratio_low", "ratio_high")]
    assert actual == pytest.approx(list(interval))
    # one document has a ratio and no interval
    assert other["perplexity"]["ratio"] == pytest.approx(math.exp(0.1))
    assert "ratio_low" not in other["perplexity"]
    (table,) = Fidelity.tables(rows).values()
    # no row has it
    assert "pass [95 %]" not in table
    assert "| 0.333 |" in table


def test_the_mean_over_tasks_by_hand():
    """One right of two and two of two on dense attention, then none and two."""
    samples = [
        sample(method, probe, 0, right=right)
        for method, keys in (("dense", [True, False]), ("cab", [False, False]))
        for probe, right in (("tracking", keys), ("uuid", [True]), ("pass", [False]))
    ]
    dense, cab = Fidelity.rows(samples, {})
    assert (dense["tasks"]["n"], dense["tasks"]["share"], cab["tasks"]["share"]) == (2, 0.75, 0.5)
    assert "delta" not in dense["tasks"]
    names = ("delta", "delta_low", "delta_high")
    parts = [tuple(cab[probe][name] for name in names) for probe in ("tracking", "uuid")]
    assert tuple(cab["tasks"][name] for name in names) == mean_of_intervals(parts)
    # who was asked some of them has no mean that could stand beside
    some = [each for each in samples if (each["method"], each["probe"]) != ("cab", "uuid")]
    dense, cab = Fidelity.rows(some, {})
    assert dense["tasks"]["share"] == 0.75 and "tasks" not in cab and cab["tracking"]["share"] == 0


def test_decoding_by_hand():
    def decoded(method, kl, *written):
        more = {"step_tokens": 2.0, "count": 10, "nll": 1.0, "agree": 8}
        return [
            sample(method, "decode", 0, kl=kl, **more),
            *(sample(method, "greedy", i, written=w, **more) for i, w in enumerate(written)),
        ]

    samples = [
        *decoded("dense", 0.0, [1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]),
        *decoded("full", 0.5, [1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]),
        # alike to the end, to the third, and from nowhere on; what meets again stays another
        *decoded("cab", 2.0, [1, 2, 3, 4], [1, 2, 3, 9], [0, 6, 7, 8]),
    ]
    dense, cab, full = Fidelity.rows(samples, {})
    assert "over_floor" not in dense["decode"]
    assert (full["decode"]["over_floor"], cab["decode"]["over_floor"]) == (1, 4)
    assert (cab["greedy"]["equal"], cab["greedy"]["prefix"]) == (1, pytest.approx(7 / 3))
    assert cab["step_share"] == 2 / 8
    (table,) = Fidelity.tables([dense, cab, full]).values()
    assert "| 2 | 0.200 | 4.00 | 0.800 | 1 of 3 | 2 of 4 |" in table
    (said,) = Fidelity.readings([dense, cab, full])
    assert "decoded KL 0.200 a token (4.0 × the floor), decoded agreement 80.0%" in said


def test_turns_by_hand():
    """KL a token 1 to 5 in the turns of one document, twice that in those of the other."""

    def turned(method, index, scale):
        turns = [{"kl": 2 * scale * at, "agree": 1, "nll": 1.0, "count": 2} for at in range(1, 6)]
        sums = {name: sum(turn[name] for turn in turns) for name in turns[0]}
        return sample(method, "turns", index, turns=turns, **sums)

    samples = [turned("dense", at, 0.0) for at in (0, 1)]
    samples += [turned("cab", at, 1.0 + at) for at in (0, 1)]
    dense, cab = Fidelity.rows(samples, {})
    assert [turn["kl"] for turn in cab["turns"]["turns"]] == [1.5, 3, 4.5, 6, 7.5]
    interval = mean_interval([5.0, 10.0], [1.0, 2.0])
    names = ("growth", "growth_low", "growth_high")
    assert [cab["turns"][name] for name in names] == pytest.approx(interval)
    (table,) = Fidelity.tables([dense, cab]).values()
    assert "| +6 [-19, +31] | 0.500, 0.500, 0.500, 0.500, 0.500 |" in table
    (said,) = Fidelity.readings([dense, cab])
    assert "KL a token 1.50 [" in said and "] in turn 5 of a chat" in said


def test_a_table_a_text_whose_name_stays_in_its_place(tmp_path):
    name = "a|b `c`\n## $d$.txt"
    samples = [
        sample(method, "pass", 0, text, right=[True])
        for text in ("prose", name)
        for method in ("dense", "cab")
    ]
    rows = Fidelity.rows(samples, {})
    shown = r"On a\|b \`c\` ## \$d\$.txt"
    assert list(Fidelity.tables(rows)) == ["On prose", shown]
    _, said = Fidelity.readings(rows)
    assert said.startswith(f"{shown}, 8 tokens")
    # nor is it a formula that matplotlib would set
    Fidelity.draw(tmp_path / "figure.png", rows)


def test_tasks_stand_side_by_side_in_a_figure(tmp_path, monkeypatch):
    tasks = ("uuid", "copying")
    samples = [
        sample(method, probe, index, right=[method != "random"])
        for method, probe, index in product(("dense", "cab", "random"), tasks, range(3))
        if (method, probe) != ("random", "copying")
    ]
    rows = Fidelity.rows(samples, {})
    drawn = []
    monkeypatch.setattr(
        fidelity_figure, "_by_name", lambda axis, *given: drawn.append((axis, given))
    )
    Fidelity.draw(tmp_path / "figure.png", rows)
    ((_, given),) = drawn
    monkeypatch.undo()
    axis = Figure().subplots()
    fidelity_figure._by_name(axis, *given)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["UUIDs", "copying"]
    marks = {}
    for each in axis.containers:
        (x,), (y,) = each.lines[0].get_data()
        marks.setdefault(each.get_label(), []).append((round(x), y))
    assert marks == {"cab": [(0, 1.0), (1, 1.0)], "random": [(0, 0.0)]}
    levels = [each for each in axis.collections if each.get_label() == "dense"]
    assert len(levels) == 2


def test_committed_results_are_those_of_their_samples():
    folder = Path(__file__).parents[2] / "eval" / "results" / "fidelity-default"
    content = json.loads(read_file(folder / "results.json"))
    _, samples = read_log(folder / "samples.jsonl")
    again = Fidelity.rows(samples, content["provenance"]["settings"])
    assert json.loads(json.dumps(again)) == content["rows"]
