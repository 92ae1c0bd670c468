"""Synthetic retrieval documents: positions of pass keys, labels, seeds and filler text."""

import random
import re
from itertools import islice

import datasets
import pytest
from words import CHAT_TEMPLATE, PROSE_TEXT, make_tokenizer

from cab_hf.data import needles
from cab_hf.data.documents import make_plain_document, make_recall_document
from cab_hf.data.needles import DISTRACTOR_TEMPLATES, NOISE_SENTENCES, split_sentences
from cab_hf.data.tasks import TASKS
from cab_hf.eval.haystack import Haystack
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import sources
from cab_hf.finetune.data import SequencePacker, pack_held_out_sequences
from cab_hf.finetune.loss import IGNORED_LABEL
from cab_hf.finetune.retrieval import DOCUMENT_KINDS, NUM_KEYS_BY_KIND, make_retrieval_document
from cab_hf.finetune.sources import make_source

DOCUMENT_TOKENS = 900
TOKENIZERS = {"plain": make_tokenizer(), "chat": make_tokenizer(CHAT_TEMPLATE)}
SENTENCES = split_sentences(PROSE_TEXT)
parametrize_document_kind = pytest.mark.parametrize("document_kind", NUM_KEYS_BY_KIND)


def decode_without_spaces(tokens, tokenizer_name="plain"):
    """Decode tokens and remove spaces, because the tokenizer puts spaces between digits."""
    return TOKENIZERS[tokenizer_name].decode(tokens).replace(" ", "")


def make_document(document_kind, tokenizer_name="plain", length=DOCUMENT_TOKENS, index=0, seed=0):
    """Return a retrieval document whose filler text is `SENTENCES`."""
    return make_retrieval_document(
        kind=document_kind,
        tokenizer=TOKENIZERS[tokenizer_name],
        sentences=SENTENCES,
        length=length,
        index=index,
        seed=seed,
    )


def decode_span(document, span, tokenizer_name="plain"):
    """Decode the tokens of a document in ``span``, a pair (start, end), without spaces."""
    start, end = span
    return decode_without_spaces(document.tokens[start:end], tokenizer_name)


@parametrize_document_kind
@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_each_key_is_stated_once_and_answered_after(document_kind, tokenizer_name):
    for length in (DOCUMENT_TOKENS, DOCUMENT_TOKENS + 7):
        document = make_document(document_kind, tokenizer_name, length)
        tokens = document.tokens
        assert len(tokens) == length
        assert len(document.needles) == len(document.answers) == NUM_KEYS_BY_KIND[document_kind]
        for needle, answer in zip(document.needles, document.answers, strict=True):
            statement_text = decode_span(document, needle, tokenizer_name)
            statement_match = re.fullmatch(
                r"Thepasskey(?:for(\w+))?is(\d+)\.Rememberit\..*", statement_text
            )
            key_owner, digits = statement_match.groups()
            assert (key_owner is None) == (NUM_KEYS_BY_KIND[document_kind] == 1)
            assert decode_span(document, answer, tokenizer_name) == digits
            text_before_answer = decode_without_spaces(
                tokens[answer[0] - 30 : answer[0]], tokenizer_name
            )
            assert text_before_answer.endswith(
                f"thepasskeyfor{key_owner}is" if document_kind == "recall" else "is"
            )
            assert needle[1] < answer[0]


@pytest.mark.parametrize("document_kind", ["passkey", "multi"])
@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_final_question_has_wording_of_evaluation(document_kind, tokenizer_name):
    document = make_document(document_kind, tokenizer_name)
    haystack = Haystack(TOKENIZERS[tokenizer_name], num_keys=NUM_KEYS_BY_KIND[document_kind])
    statement_text = decode_span(document, document.needles[-1], tokenizer_name)
    statement_match = re.match(r"Thepasskeyfor([A-Z][a-z]+)is", statement_text)
    key_owner = f" for {statement_match[1]}" if statement_match else ""
    # the texts of an evaluation prompt before and after its filler text
    separator = "Here we go."
    prompt_parts = haystack.render_prompt(key_owner, [], [separator]).split(separator)
    text_before, text_after = (
        decode_without_spaces(haystack.encode(prompt_part), tokenizer_name)
        for prompt_part in prompt_parts
    )
    document_prompt = decode_without_spaces(
        document.tokens[: document.answers[-1][0]], tokenizer_name
    )
    assert document_prompt.startswith(text_before) and document_prompt.endswith(text_after)


def test_distractors_differ_from_answers():
    def find_distractor_numbers(document_kind):
        """Return (text of a document, its five-digit numbers except for the pass key)."""
        document = make_document(document_kind, length=2000)
        document_text = decode_without_spaces(document.tokens)
        key = decode_span(document, document.answers[0])
        return document_text, set(re.findall(r"\d{5}", document_text)) - {key}

    assert find_distractor_numbers("passkey")[1] == set()
    document_text, distractor_numbers = find_distractor_numbers("distractors")
    assert len(distractor_numbers) > 5
    distractor_wordings = [
        distractor.replace(" ", "").partition("{}")[0] for distractor in DISTRACTOR_TEMPLATES
    ]
    assert all(
        any(f"{wording}{number}" in document_text for wording in distractor_wordings)
        for number in distractor_numbers
    )


@pytest.mark.parametrize("length", [DOCUMENT_TOKENS, 4001])
def test_repetitions_are_reordered(length):
    document = make_document("repeats", length=length)
    assert len(document.tokens) == length
    key_owners, stated_sentences = [], set()
    for needle, answer in zip(document.needles, document.answers, strict=True):
        assert needle[1] <= length // 2 < answer[0]
        statement_tokens, labelled_tokens = (
            document.tokens[start:end] for start, end in (needle, answer)
        )
        # the words that identify a statement, such as the owner of the key, precede its answer
        key_match = re.fullmatch(
            r"Thepasskeyfor(\w+)is(\d{5})\.", decode_without_spaces(statement_tokens)
        )
        num_identifying_tokens = len(statement_tokens) - 6 if key_match else 3
        end = answer[0] + len(statement_tokens) - num_identifying_tokens
        assert document.tokens[answer[0] - num_identifying_tokens : end] == statement_tokens
        if key_match:
            key_owners.append(key_match[1])
            assert decode_without_spaces(labelled_tokens) == key_match[2]
        else:
            stated_sentences.add(decode_without_spaces(statement_tokens))
            assert labelled_tokens == statement_tokens[3:]
    # the shortest sentence has no labels, because three tokens identify a sentence
    assert {sentence.replace(" ", "") for sentence in SENTENCES} - {
        "askednobody."
    } == stated_sentences
    assert any(key_owner in needles.PERSON_NAMES for key_owner in key_owners)
    assert (
        any(key_owner.startswith("locker") for key_owner in key_owners)
        and len(key_owners) == len({*key_owners}) > 20
    )
    assert list(document.needles) != sorted(document.needles)


@parametrize_document_kind
@pytest.mark.parametrize("changed_argument", ["index", "seed", "length"])
def test_document_depends_on_seed_and_index_only(document_kind, changed_argument):
    document_arguments = {"index": 1, "seed": 0, "length": DOCUMENT_TOKENS}
    document = make_document(document_kind, **document_arguments)
    assert document == make_document(document_kind, **document_arguments)
    other_document = make_document(
        document_kind,
        **{**document_arguments, changed_argument: document_arguments[changed_argument] + 1},
    )

    def find_keys(document):
        return {document.tokens[start:end] for start, end in document.answers}

    assert find_keys(other_document) != find_keys(document)


def make_mixture(source_name, texts=(), text_share=0.0, **source_options):
    """Return a mixture as a list of (source, weight): ``source_name``, and a source of ``texts``.

    ``text_share`` is the weight of ``texts``; the source ``source_name`` has weight
    ``1 - text_share``. Without ``texts``, the mixture has the source ``source_name`` only.
    """
    source_shares = [(make_source(source_name, **source_options), 1 - text_share)]
    if texts:
        dataset = datasets.Dataset.from_dict({"text": list(texts)})
        source_shares.append((sources.TextSource("texts", dataset, "text"), text_share))
    return source_shares


def pack_sequences(source_name, texts=(), length=DOCUMENT_TOKENS, num_sequences=4):
    """Return the first packed sequences of the retrieval source ``source_name``."""
    packer = SequencePacker(
        TOKENIZERS["chat"], make_mixture(source_name, texts), length, 0, hold_out_every=0
    )
    return list(islice(packer, num_sequences))


@parametrize_document_kind
def test_only_answers_have_labels(document_kind):
    (sequence,) = pack_sequences(f"retrieval:{document_kind}", num_sequences=1)
    token_ids, labels = sequence["input_ids"].tolist(), sequence["labels"].tolist()
    labelled_indices = [index for index, label in enumerate(labels) if label != IGNORED_LABEL]
    assert len(labelled_indices) == 5 * NUM_KEYS_BY_KIND[document_kind]
    # labels are shifted: the label at an index is the token at the next index
    assert all(labels[index] == token_ids[index + 1] for index in labelled_indices)
    answer_indices = (
        labelled_indices[first_index : first_index + 5]
        for first_index in range(0, len(labelled_indices), 5)
    )
    answers = [
        decode_without_spaces([token_ids[index + 1] for index in indices], "chat")
        for indices in answer_indices
    ]
    assert all(re.fullmatch(r"\d{5}", answer) for answer in answers)
    # each key occurs three times: twice in its statement, and once in the answer
    sequence_text = decode_without_spaces(token_ids, "chat")
    assert [sequence_text.count(answer) for answer in answers] == [3] * NUM_KEYS_BY_KIND[
        document_kind
    ]


@pytest.mark.parametrize("task_name", TASKS)
def test_task_answers_have_labels(task_name):
    (sequence,) = pack_sequences(f"retrieval:{task_name}", num_sequences=1)
    document = make_document(task_name, "chat")
    example = TASKS[task_name].make(
        TOKENIZERS["chat"], SENTENCES, DOCUMENT_TOKENS, index=0, seed="finetune/0"
    )
    assert document == (example.tokens, example.needles, example.answers)
    num_labelled_tokens = int((sequence["labels"] != IGNORED_LABEL).sum())
    assert num_labelled_tokens == sum(end - start for start, end in example.answers)


def test_document_kinds_alternate():
    sequences = pack_sequences("retrieval:passkey+recall+passkey", num_sequences=6)
    labelled_key_counts = [
        int((sequence["labels"] != IGNORED_LABEL).sum()) // 5 for sequence in sequences
    ]
    assert labelled_key_counts == [1, 12, 1, 1, 12, 1]


@pytest.mark.parametrize(
    "texts",
    [
        # texts that are longer, and shorter, than a document
        *(["The old town slept! " * 300], ["The old town slept!"] * 50),
        # a text without sentence ends, and blank texts
        *(["old town slept " * 900], ["", " ", "The old town slept! " * 90]),
    ],
)
def test_keys_are_inserted_into_text_of_other_sources(texts):
    for sequence in pack_sequences("retrieval:passkey+recall", texts):
        text = decode_without_spaces(sequence["input_ids"], "chat")
        assert text.count("oldtownslept") > 20
        assert "grassisgreen" not in text


class RecordingRandom(random.Random):
    """Random generator that appends its seed to the class attribute ``seeds``."""

    seeds: list = []

    def __init__(self, seed=None):
        self.seeds.append(seed)
        super().__init__(seed)


def test_training_seeds_differ_from_evaluation_seeds(monkeypatch):
    """Check that training seeds, which start with "finetune/", equal no evaluation seed."""
    monkeypatch.setattr(random, "Random", RecordingRandom)
    tokenizer = TOKENIZERS["chat"]

    def record_seeds(make_documents):
        """Return the seeds of all random generators that ``make_documents`` creates."""
        monkeypatch.setattr(RecordingRandom, "seeds", [])
        make_documents()
        return set(map(str, RecordingRandom.seeds))

    def make_evaluation_documents():
        for seed in (-1, 0, 1, 12):
            make_recall_document(
                tokenizer, NOISE_SENTENCES, DOCUMENT_TOKENS, 12, index=0, seed=seed
            )
            make_plain_document(tokenizer, NOISE_SENTENCES, DOCUMENT_TOKENS, index=0, seed=seed)
            for num_keys in (1, 4):
                Haystack(tokenizer, num_keys=num_keys).make_prompt(DOCUMENT_TOKENS, 0.5, 0, seed)
            for task in TASKS.values():
                task.make(tokenizer, NOISE_SENTENCES, DOCUMENT_TOKENS, index=0, seed=seed)

    def make_training_documents():
        for seed in (-1, 0, 1, 12):
            source_shares = [(make_source(f"retrieval:{'+'.join(DOCUMENT_KINDS)}", seed=seed), 1)]
            packer = SequencePacker(tokenizer, source_shares, DOCUMENT_TOKENS, seed)
            for _ in DOCUMENT_KINDS:
                next(packer)
            pack_held_out_sequences(
                tokenizer,
                source_shares,
                DOCUMENT_TOKENS,
                num_sequences=len(DOCUMENT_KINDS),
                seed=seed,
            )

    evaluation_seeds, training_seeds = (
        record_seeds(make_evaluation_documents),
        record_seeds(make_training_documents),
    )
    assert all(re.match(r"-?\d+/", seed) for seed in evaluation_seeds)
    assert all(seed.startswith("finetune/") for seed in training_seeds)
    assert len(training_seeds) > 2 * 4 * len(DOCUMENT_KINDS)


@pytest.mark.parametrize("document_kind", (*NUM_KEYS_BY_KIND, "repeats", "keys"))
def test_too_short_length_raises(document_kind):
    with pytest.raises(ValueError, match="must have room for"):
        make_document(document_kind, length=20)


@pytest.mark.parametrize("text_share", [0.3, 0.0], ids=["with text documents", "synthetic only"])
def test_synthetic_documents_are_not_split(text_share):
    tokenizer, num_synthetic_documents, num_padded_sequences = TOKENIZERS["plain"], 0, 0
    source_shares = make_mixture(
        "retrieval:passkey+distractors+multi:260", SENTENCES * 3, text_share
    )
    for sequence in islice(SequencePacker(tokenizer, source_shares, 300, 0), 12):
        token_ids, positions, labels = (sequence[tensor_name].tolist() for tensor_name in sequence)
        document_starts = [index for index, position in enumerate(positions) if position == 0]
        document_sizes = [
            end - start
            for start, end in zip(
                document_starts, [*document_starts[1:], len(token_ids)], strict=True
            )
        ]
        first_words = (tokenizer.decode(token_ids[start : start + 3]) for start in document_starts)
        synthetic_flags = [
            first_text.startswith(("There is an", "There are")) for first_text in first_words
        ]
        assert {
            document_size
            for document_size, is_synthetic_document in zip(
                document_sizes, synthetic_flags, strict=True
            )
            if is_synthetic_document
        } <= {260}
        num_synthetic_documents += sum(synthetic_flags)
        if not text_share:
            num_padded_sequences += 1
            assert labels[260:] == [IGNORED_LABEL] * 40
            assert token_ids[260:] == [tokenizer.pad_token_id] * 40
    assert num_synthetic_documents >= 8
    assert num_padded_sequences == (0 if text_share else 12)


def test_held_out_retrieval_uses_held_out_text():
    source_texts = [" ".join(["rained" if number % 10 else "nobody"] * 300) for number in range(40)]
    source_shares, tokenizer = (
        make_mixture("retrieval:passkey:200", source_texts),
        TOKENIZERS["plain"],
    )
    held_out_sequences = pack_held_out_sequences(
        tokenizer, source_shares, 200, 4, hold_out_every=10
    )
    training_sequences = list(
        islice(SequencePacker(tokenizer, source_shares, 200, 0, hold_out_every=10), 4)
    )
    for sequences, expected_word, other_word in (
        (held_out_sequences, "nobody", "rained"),
        (training_sequences, "rained", "nobody"),
    ):
        texts = [tokenizer.decode(sequence["input_ids"]) for sequence in sequences]
        assert len(texts) == 4 and all(
            expected_word in text and other_word not in text for text in texts
        )


def test_too_short_document_error_names_source():
    """Read 50 documents, because only later documents have sentences that do not fit."""
    with pytest.raises(UsageError, match="source 'retrieval:keys:25': length must .*, got 25"):
        pack_sequences("retrieval:keys:25", length=25, num_sequences=50)
