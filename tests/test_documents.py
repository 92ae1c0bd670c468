"""Documents that repeat earlier content: spans of statements and answers, and determinism."""

import re

import pytest
from words import PROSE_TEXT, make_merging_tokenizer, make_tokenizer

from cab_hf.data import documents
from cab_hf.data.documents import make_asked_document, make_plain_document, make_recall_document
from cab_hf.data.needles import (
    NOISE_SENTENCES,
    find_span,
    join_sentences,
    sentence_tokens,
    split_sentences,
)

DOCUMENT_TOKENS, NUM_KEYS = 900, 6
DOCUMENT_ARGUMENTS = {"length": DOCUMENT_TOKENS, "num_keys": NUM_KEYS, "index": 0, "seed": 0}
SOURCE_CODE = (
    "import os\n\n\ndef area(width, height):\n    both = width * height  \n    return both\n" * 12
)


TOKENIZERS = {"words": make_tokenizer(), "merging": make_merging_tokenizer()}


def decode_text(tokenizer, tokens):
    """Decode tokens and remove spaces, because a tokenizer puts spaces between digits."""
    return tokenizer.decode(tokens).replace(" ", "")


def decode_span(tokenizer, document, span):
    """Decode the tokens of a document in ``span`` (start, end) by `decode_text`."""
    start, end = span
    return decode_text(tokenizer, document.tokens[start:end])


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
@pytest.mark.parametrize(
    "sentences", [NOISE_SENTENCES, split_sentences(PROSE_TEXT)], ids=["noise", "text"]
)
def test_spans_locate_statements_and_answers(tokenizer_name, sentences):
    tokenizer = TOKENIZERS[tokenizer_name]
    document = make_recall_document(tokenizer, sentences, **DOCUMENT_ARGUMENTS)
    assert len(document.tokens) == DOCUMENT_TOKENS
    assert len(document.needles) == len(document.answers) == NUM_KEYS
    for needle_span, answer_span in zip(document.needles, document.answers, strict=True):
        assert needle_span[1] <= DOCUMENT_TOKENS // 2 <= answer_span[0]
        statement = decode_span(tokenizer, document, needle_span)
        digits = decode_span(tokenizer, document, answer_span)
        owner, key = re.fullmatch(r"Thepasskeyfor(\w+)is(\d+)\.Rememberit\..*", statement).groups()
        assert digits == key
        preceding_text = decode_text(
            tokenizer, document.tokens[answer_span[0] - 30 : answer_span[0]]
        )
        assert preceding_text.endswith(f"thepasskeyfor{owner}is")


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_answers_can_start_at_block_borders(tokenizer_name):
    tokenizer, document_arguments = (
        TOKENIZERS[tokenizer_name],
        {**DOCUMENT_ARGUMENTS, "length": 2 * DOCUMENT_TOKENS},
    )
    unaligned_document, aligned_document = (
        make_recall_document(
            tokenizer,
            split_sentences(PROSE_TEXT),
            **document_arguments,
            answer_alignment=answer_alignment,
        )
        for answer_alignment in (1, 32)
    )
    assert unaligned_document == make_recall_document(
        tokenizer, split_sentences(PROSE_TEXT), **document_arguments
    )
    assert len(aligned_document.tokens) == len(unaligned_document.tokens) == 2 * DOCUMENT_TOKENS
    assert aligned_document.needles == unaligned_document.needles
    for answer_span, unaligned_span in zip(
        aligned_document.answers, unaligned_document.answers, strict=True
    ):
        assert (
            answer_span[0] % 32 == 0
            and DOCUMENT_TOKENS <= answer_span[0] < answer_span[1] <= 2 * DOCUMENT_TOKENS
        )
        # the six tokens before an answer also equal those before the repeated statement
        answer_tokens = aligned_document.tokens[answer_span[0] - 6 : answer_span[1]]
        assert answer_tokens == unaligned_document.tokens[unaligned_span[0] - 6 : unaligned_span[1]]
        # each repetition is introduced after the end of a sentence
        preceding_text = decode_text(
            tokenizer, aligned_document.tokens[answer_span[0] - 60 : answer_span[0]]
        )
        assert re.search(r"[.!?]\W?Aswassaidabove", preceding_text)
    assert any(answer[0] % 32 for answer in unaligned_document.answers)


def test_key_repetitions_are_reordered():
    for index in range(8):
        document_arguments = {**DOCUMENT_ARGUMENTS, "num_keys": 2, "index": index}
        document = make_recall_document(TOKENIZERS["words"], NOISE_SENTENCES, **document_arguments)
        assert list(document.needles) == sorted(document.needles)
        assert list(document.answers) != sorted(document.answers)


@pytest.mark.parametrize("changed_argument", ["index", "seed", "num_keys", "length"])
def test_document_depends_on_seed_and_index_only(changed_argument):
    document = make_recall_document(make_tokenizer(), NOISE_SENTENCES, **DOCUMENT_ARGUMENTS)
    assert (
        make_recall_document(make_tokenizer(), list(NOISE_SENTENCES), **DOCUMENT_ARGUMENTS)
        == document
    )
    other_document = make_recall_document(
        make_tokenizer(),
        NOISE_SENTENCES,
        **{**DOCUMENT_ARGUMENTS, changed_argument: DOCUMENT_ARGUMENTS[changed_argument] + 1},
    )
    assert other_document.answers[:2] != document.answers[:2]


def test_plain_document_is_contiguous_source_text():
    tokenizer, source_text = TOKENIZERS["words"], " ".join([*NOISE_SENTENCES, *NOISE_SENTENCES])
    # `NOISE_SENTENCES` is shorter than 100 tokens, so the document repeats the noise
    tokens = make_plain_document(tokenizer, NOISE_SENTENCES, 100, index=3)
    assert len(tokens) == 100
    assert decode_text(tokenizer, tokens[:20]) in source_text.replace(" ", "")
    distinct_documents = {
        make_plain_document(tokenizer, NOISE_SENTENCES, 20, index) for index in range(12)
    }
    assert len(distinct_documents) > 2


def test_document_starts_with_special_tokens():
    tokenizer = TOKENIZERS["merging"]
    for tokens in (
        make_plain_document(tokenizer, NOISE_SENTENCES, 50, 0),
        make_recall_document(tokenizer, NOISE_SENTENCES, **DOCUMENT_ARGUMENTS).tokens,
    ):
        assert tokens[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in tokens[1:]


def test_leading_space_token_belongs_to_digits():
    tokenizer, sentence = TOKENIZERS["merging"], "The number is 10000."
    tokens = sentence_tokens(tokenizer, sentence)
    start, end = find_span(tokenizer, sentence, "10000")
    assert tokenizer.decode(tokens[start:end]) == " 10000"


@pytest.mark.parametrize("make_document", [make_recall_document, make_asked_document])
@pytest.mark.parametrize(
    ("changed_arguments", "error_pattern"),
    [
        pytest.param({"num_keys": 0}, "keys must be 1 to", id="no keys"),
        pytest.param({"num_keys": 99}, "keys must be 1 to", id="too many"),
        pytest.param(
            {"length": 150}, "length must have room for 6 keys .*, got 150", id="too short"
        ),
    ],
)
def test_too_short_document_raises(make_document, changed_arguments, error_pattern):
    with pytest.raises(ValueError, match=error_pattern):
        make_document(
            TOKENIZERS["words"], NOISE_SENTENCES, **{**DOCUMENT_ARGUMENTS, **changed_arguments}
        )


def test_one_long_sentence_leaves_space_for_needles():
    tokenizer = TOKENIZERS["words"]
    # for some seeds, one long sentence fills the second half of the document
    sentences = [*NOISE_SENTENCES, " ".join(NOISE_SENTENCES * 30)]
    for seed in range(20):
        document = make_recall_document(tokenizer, sentences, **DOCUMENT_ARGUMENTS | {"seed": seed})
        assert len(document.tokens) == DOCUMENT_TOKENS
        for start, end in document.needles:
            assert end <= DOCUMENT_TOKENS // 2 and "pass key" in tokenizer.decode(
                document.tokens[start:end]
            )
        for start, _ in document.answers:
            assert start >= DOCUMENT_TOKENS // 2


def test_source_code_is_split_at_lines():
    lines = split_sentences(SOURCE_CODE)
    assert lines[:4] == [
        "\nimport os",
        "\n\n\ndef area(width, height):",
        "\n    both = width * height",
        "\n    return both",
    ]
    # joining the lines gives the source code without trailing blanks
    assert join_sentences(lines) == SOURCE_CODE.replace("height  \n", "height\n").strip()


def test_prose_is_split_at_sentences_across_lines():
    long_sentence = "A" + "\nword" * 61 + "."
    sentences = split_sentences(f"{long_sentence} {PROSE_TEXT * 9}")
    assert sentences[0] == " ".join(long_sentence.split())
    assert sentences[1:5] == split_sentences(PROSE_TEXT)[:4]
    assert join_sentences(NOISE_SENTENCES) == " ".join(NOISE_SENTENCES)


def test_copies_occur_twice_outside_of_needles():
    tokenizer = make_tokenizer()
    document = make_recall_document(tokenizer, split_sentences(PROSE_TEXT), 900, 3, index=0)
    changed_document, start_pairs = documents.insert_copies(document, 2, 40)
    assert len(start_pairs) == 2 and len(changed_document.tokens) == 900
    assert (changed_document.needles, changed_document.answers) == (
        document.needles,
        document.answers,
    )
    for source_start, copy_start in start_pairs:
        assert source_start + 40 <= 450 <= copy_start
        copied_tokens = document.tokens[source_start : source_start + 40]
        assert changed_document.tokens[copy_start : copy_start + 40] == copied_tokens
        assert changed_document.tokens[source_start : source_start + 40] == copied_tokens
    for start, end in (*document.needles, *document.answers):
        assert changed_document.tokens[start:end] == document.tokens[start:end]
    assert documents.insert_copies(document, 2, 40) == (changed_document, start_pairs)
    assert documents.insert_copies(document, 2, 800)[1] == ()


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_prompt_states_all_keys_and_answers_repeat_them(tokenizer_name):
    tokenizer = TOKENIZERS[tokenizer_name]
    document, prompt_length = make_asked_document(tokenizer, NOISE_SENTENCES, **DOCUMENT_ARGUMENTS)
    assert len(document.tokens) == DOCUMENT_TOKENS
    for needle_span, answer_span in zip(document.needles, document.answers, strict=True):
        assert needle_span[1] <= prompt_length <= answer_span[0] < answer_span[1] <= DOCUMENT_TOKENS
        statement = decode_span(tokenizer, document, needle_span)
        digits = decode_span(tokenizer, document, answer_span)
        assert re.fullmatch(r"\d{5}", digits) and statement.count(digits) == 2
    after_prompt = decode_text(tokenizer, document.tokens[prompt_length:])
    assert after_prompt.startswith("Aswassaid") and after_prompt.count("Aswassaid") == NUM_KEYS
    # the order of answers differs from the order of statements
    assert list(document.answers) != sorted(document.answers)
