"""Documents that repeat earlier content: spans of statements and answers, and determinism."""

import re

import pytest
from words import TEXT, make_merging_tokenizer, make_tokenizer

from cab_hf.data import documents
from cab_hf.data.documents import asked_document, plain_document, recall_document
from cab_hf.data.needles import NOISE, running, sentence_tokens, span_of, split_sentences

LENGTH, KEYS = 900, 6
ARGUMENTS = {"length": LENGTH, "keys": KEYS, "index": 0, "seed": 0}
CODE = (
    "import os\n\n\ndef area(width, height):\n    both = width * height  \n    return both\n" * 12
)


TOKENIZERS = {"words": make_tokenizer(), "merging": make_merging_tokenizer()}


def text_of(tokenizer, tokens):
    """Decode tokens and remove spaces, because a tokenizer puts spaces between digits."""
    return tokenizer.decode(tokens).replace(" ", "")


def span_text(tokenizer, document, span):
    """Decode the tokens of a document in ``span`` (start, end) by `text_of`."""
    start, end = span
    return text_of(tokenizer, document.tokens[start:end])


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("sentences", [NOISE, split_sentences(TEXT)], ids=["noise", "text"])
def test_spans_locate_statements_and_answers(name, sentences):
    tokenizer = TOKENIZERS[name]
    document = recall_document(tokenizer, sentences, **ARGUMENTS)
    assert len(document.tokens) == LENGTH
    assert len(document.needles) == len(document.answers) == KEYS
    for needle, answer in zip(document.needles, document.answers, strict=True):
        assert needle[1] <= LENGTH // 2 <= answer[0]
        stated = span_text(tokenizer, document, needle)
        digits = span_text(tokenizer, document, answer)
        owner, key = re.fullmatch(r"Thepasskeyfor(\w+)is(\d+)\.Rememberit\..*", stated).groups()
        assert digits == key
        before = text_of(tokenizer, document.tokens[answer[0] - 30 : answer[0]])
        assert before.endswith(f"thepasskeyfor{owner}is")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_answers_can_start_at_block_borders(name):
    tokenizer, arguments = TOKENIZERS[name], {**ARGUMENTS, "length": 2 * LENGTH}
    plain, document = (
        recall_document(tokenizer, split_sentences(TEXT), **arguments, border=border)
        for border in (1, 32)
    )
    assert plain == recall_document(tokenizer, split_sentences(TEXT), **arguments)
    assert len(document.tokens) == len(plain.tokens) == 2 * LENGTH
    assert document.needles == plain.needles
    for answer, other in zip(document.answers, plain.answers, strict=True):
        assert answer[0] % 32 == 0 and LENGTH <= answer[0] < answer[1] <= 2 * LENGTH
        # the six tokens before an answer also equal those before the repeated statement
        own_tokens = document.tokens[answer[0] - 6 : answer[1]]
        assert own_tokens == plain.tokens[other[0] - 6 : other[1]]
        # each repetition is introduced after the end of a sentence
        before = text_of(tokenizer, document.tokens[answer[0] - 60 : answer[0]])
        assert re.search(r"[.!?]\W?Aswassaidabove", before)
    assert any(answer[0] % 32 for answer in plain.answers)


def test_key_repetitions_are_reordered():
    for index in range(8):
        arguments = {**ARGUMENTS, "keys": 2, "index": index}
        document = recall_document(TOKENIZERS["words"], NOISE, **arguments)
        assert list(document.needles) == sorted(document.needles)
        assert list(document.answers) != sorted(document.answers)


@pytest.mark.parametrize("change", ["index", "seed", "keys", "length"])
def test_document_depends_on_seed_and_index_only(change):
    document = recall_document(make_tokenizer(), NOISE, **ARGUMENTS)
    assert recall_document(make_tokenizer(), list(NOISE), **ARGUMENTS) == document
    other = recall_document(make_tokenizer(), NOISE, **{**ARGUMENTS, change: ARGUMENTS[change] + 1})
    assert other.answers[:2] != document.answers[:2]


def test_plain_document_is_contiguous_source_text():
    tokenizer, text = TOKENIZERS["words"], " ".join([*NOISE, *NOISE])
    # `NOISE` is shorter than 100 tokens, so the document repeats the noise
    tokens = plain_document(tokenizer, NOISE, 100, index=3)
    assert len(tokens) == 100
    assert text_of(tokenizer, tokens[:20]) in text.replace(" ", "")
    starts = {plain_document(tokenizer, NOISE, 20, index) for index in range(12)}
    assert len(starts) > 2


def test_document_starts_with_special_tokens():
    tokenizer = TOKENIZERS["merging"]
    for tokens in (
        plain_document(tokenizer, NOISE, 50, 0),
        recall_document(tokenizer, NOISE, **ARGUMENTS).tokens,
    ):
        assert tokens[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in tokens[1:]


def test_leading_space_token_belongs_to_digits():
    tokenizer, sentence = TOKENIZERS["merging"], "The number is 10000."
    tokens = sentence_tokens(tokenizer, sentence)
    start, end = span_of(tokenizer, sentence, "10000")
    assert tokenizer.decode(tokens[start:end]) == " 10000"


@pytest.mark.parametrize("make", [recall_document, asked_document])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"keys": 0}, "keys must be 1 to", id="no keys"),
        pytest.param({"keys": 99}, "keys must be 1 to", id="too many"),
        pytest.param(
            {"length": 150}, "length must have room for 6 keys .*, got 150", id="too short"
        ),
    ],
)
def test_too_short_document_raises(make, change, message):
    with pytest.raises(ValueError, match=message):
        make(TOKENIZERS["words"], NOISE, **{**ARGUMENTS, **change})


def test_one_long_sentence_leaves_space_for_needles():
    tokenizer = TOKENIZERS["words"]
    # for some seeds, one long sentence fills the second half of the document
    sentences = [*NOISE, " ".join(NOISE * 30)]
    for seed in range(20):
        document = recall_document(tokenizer, sentences, **ARGUMENTS | {"seed": seed})
        assert len(document.tokens) == LENGTH
        for start, end in document.needles:
            assert end <= LENGTH // 2 and "pass key" in tokenizer.decode(document.tokens[start:end])
        for start, _ in document.answers:
            assert start >= LENGTH // 2


def test_source_code_is_split_at_lines():
    lines = split_sentences(CODE)
    assert lines[:4] == [
        "\nimport os",
        "\n\n\ndef area(width, height):",
        "\n    both = width * height",
        "\n    return both",
    ]
    # joining the lines gives the source code without trailing blanks
    assert running(lines) == CODE.replace("height  \n", "height\n").strip()


def test_prose_is_split_at_sentences_across_lines():
    long_sentence = "A" + "\nword" * 61 + "."
    sentences = split_sentences(f"{long_sentence} {TEXT * 9}")
    assert sentences[0] == " ".join(long_sentence.split())
    assert sentences[1:5] == split_sentences(TEXT)[:4]
    assert running(NOISE) == " ".join(NOISE)


def test_copies_occur_twice_outside_of_needles():
    tokenizer = make_tokenizer()
    document = recall_document(tokenizer, split_sentences(TEXT), 900, 3, index=0)
    changed, copies = documents.with_copies(document, 2, 40)
    assert len(copies) == 2 and len(changed.tokens) == 900
    assert (changed.needles, changed.answers) == (document.needles, document.answers)
    for source, target in copies:
        assert source + 40 <= 450 <= target
        original = document.tokens[source : source + 40]
        assert changed.tokens[target : target + 40] == original
        assert changed.tokens[source : source + 40] == original
    for start, end in (*document.needles, *document.answers):
        assert changed.tokens[start:end] == document.tokens[start:end]
    assert documents.with_copies(document, 2, 40) == (changed, copies)
    assert documents.with_copies(document, 2, 800)[1] == ()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompt_states_all_keys_and_answers_repeat_them(name):
    tokenizer = TOKENIZERS[name]
    document, prompt = asked_document(tokenizer, NOISE, **ARGUMENTS)
    assert len(document.tokens) == LENGTH
    for needle, answer in zip(document.needles, document.answers, strict=True):
        assert needle[1] <= prompt <= answer[0] < answer[1] <= LENGTH
        stated = span_text(tokenizer, document, needle)
        digits = span_text(tokenizer, document, answer)
        assert re.fullmatch(r"\d{5}", digits) and stated.count(digits) == 2
    after_prompt = text_of(tokenizer, document.tokens[prompt:])
    assert after_prompt.startswith("Aswassaid") and after_prompt.count("Aswassaid") == KEYS
    # the order of answers differs from the order of statements
    assert list(document.answers) != sorted(document.answers)
