"""Synthetic retrieval documents: positions of pass keys, labels, seeds and filler text."""

import random
import re
from itertools import islice

import datasets
import pytest
from words import CHAT_TEMPLATE, TEXT, make_tokenizer

from cab_hf.data import needles
from cab_hf.data.documents import make_plain_document, make_recall_document
from cab_hf.data.needles import DISTRACTORS, NOISE_SENTENCES, split_sentences
from cab_hf.data.tasks import TASKS
from cab_hf.eval.haystack import Haystack
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import sources
from cab_hf.finetune.data import Packed, pack_held_out
from cab_hf.finetune.loss import IGNORED_LABEL
from cab_hf.finetune.retrieval import KINDS, NUM_KEYS, make_retrieval_document
from cab_hf.finetune.sources import make_source

LENGTH = 900
TOKENIZERS = {"plain": make_tokenizer(), "chat": make_tokenizer(CHAT_TEMPLATE)}
SENTENCES = split_sentences(TEXT)
parametrize_kind = pytest.mark.parametrize("kind", NUM_KEYS)


def decode_without_spaces(tokens, tokenizer="plain"):
    """Decode tokens and remove spaces, because the tokenizer puts spaces between digits."""
    return TOKENIZERS[tokenizer].decode(tokens).replace(" ", "")


def make_document(kind, tokenizer="plain", length=LENGTH, index=0, seed=0):
    """Return a retrieval document whose filler text is `SENTENCES`."""
    return make_retrieval_document(
        kind=kind,
        tokenizer=TOKENIZERS[tokenizer],
        sentences=SENTENCES,
        length=length,
        index=index,
        seed=seed,
    )


def span_text(document, span, tokenizer="plain"):
    """Decode the tokens of a document in ``span``, a pair (start, end), without spaces."""
    start, end = span
    return decode_without_spaces(document.tokens[start:end], tokenizer)


@parametrize_kind
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_each_key_is_stated_once_and_answered_after(kind, tokenizer):
    for length in (LENGTH, LENGTH + 7):
        document = make_document(kind, tokenizer, length)
        tokens = document.tokens
        assert len(tokens) == length
        assert len(document.needles) == len(document.answers) == NUM_KEYS[kind]
        for needle, answer in zip(document.needles, document.answers, strict=True):
            stated = span_text(document, needle, tokenizer)
            match = re.fullmatch(r"Thepasskey(?:for(\w+))?is(\d+)\.Rememberit\..*", stated)
            owner, digits = match.groups()
            assert (owner is None) == (NUM_KEYS[kind] == 1)
            assert span_text(document, answer, tokenizer) == digits
            before = decode_without_spaces(tokens[answer[0] - 30 : answer[0]], tokenizer)
            assert before.endswith(f"thepasskeyfor{owner}is" if kind == "recall" else "is")
            assert needle[1] < answer[0]


@pytest.mark.parametrize("kind", ["passkey", "multi"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_final_question_has_wording_of_evaluation(kind, tokenizer):
    document = make_document(kind, tokenizer)
    haystack = Haystack(TOKENIZERS[tokenizer], keys=NUM_KEYS[kind])
    stated = span_text(document, document.needles[-1], tokenizer)
    match = re.match(r"Thepasskeyfor([A-Z][a-z]+)is", stated)
    owner = f" for {match[1]}" if match else ""
    # the texts of an evaluation prompt before and after its filler text
    separator = "Here we go."
    parts = haystack.render(owner, [], [separator]).split(separator)
    before, after = (decode_without_spaces(haystack.encode(part), tokenizer) for part in parts)
    prompt = decode_without_spaces(document.tokens[: document.answers[-1][0]], tokenizer)
    assert prompt.startswith(before) and prompt.endswith(after)


def test_distractors_differ_from_answers():
    def other_numbers(kind):
        """Return (text of a document, its five-digit numbers except for the pass key)."""
        document = make_document(kind, length=2000)
        text = decode_without_spaces(document.tokens)
        key = span_text(document, document.answers[0])
        return text, set(re.findall(r"\d{5}", text)) - {key}

    assert other_numbers("passkey")[1] == set()
    text, numbers = other_numbers("distractors")
    assert len(numbers) > 5
    wordings = [each.replace(" ", "").partition("{}")[0] for each in DISTRACTORS]
    assert all(any(f"{wording}{number}" in text for wording in wordings) for number in numbers)


@pytest.mark.parametrize("length", [LENGTH, 4001])
def test_repetitions_are_reordered(length):
    document = make_document("repeats", length=length)
    assert len(document.tokens) == length
    keys, sentences = [], set()
    for needle, answer in zip(document.needles, document.answers, strict=True):
        assert needle[1] <= length // 2 < answer[0]
        stated, labelled = (document.tokens[start:end] for start, end in (needle, answer))
        # the words that identify a statement, such as the owner of the key, precede its answer
        key = re.fullmatch(r"Thepasskeyfor(\w+)is(\d{5})\.", decode_without_spaces(stated))
        num_identifying = len(stated) - 6 if key else 3
        end = answer[0] + len(stated) - num_identifying
        assert document.tokens[answer[0] - num_identifying : end] == stated
        if key:
            keys.append(key[1])
            assert decode_without_spaces(labelled) == key[2]
        else:
            sentences.add(decode_without_spaces(stated))
            assert labelled == stated[3:]
    # the shortest sentence has no labels, because three tokens identify a sentence
    assert {each.replace(" ", "") for each in SENTENCES} - {"askednobody."} == sentences
    assert any(each in needles.NAMES for each in keys)
    assert any(each.startswith("locker") for each in keys) and len(keys) == len({*keys}) > 20
    assert list(document.needles) != sorted(document.needles)


@parametrize_kind
@pytest.mark.parametrize("change", ["index", "seed", "length"])
def test_document_depends_on_seed_and_index_only(kind, change):
    arguments = {"index": 1, "seed": 0, "length": LENGTH}
    document = make_document(kind, **arguments)
    assert document == make_document(kind, **arguments)
    other = make_document(kind, **{**arguments, change: arguments[change] + 1})

    def keys(document):
        return {document.tokens[start:end] for start, end in document.answers}

    assert keys(other) != keys(document)


def make_mixture(name, texts=(), share=0.0, **options):
    """Return a mixture as a list of (source, weight): source ``name``, and a source of ``texts``.

    ``share`` is the weight of ``texts``; the source ``name`` has weight ``1 - share``. Without
    ``texts``, the mixture has the source ``name`` only.
    """
    pairs = [(make_source(name, **options), 1 - share)]
    if texts:
        dataset = datasets.Dataset.from_dict({"text": list(texts)})
        pairs.append((sources.TextSource("texts", dataset, "text"), share))
    return pairs


def pack_sequences(name, texts=(), length=LENGTH, count=4):
    """Return the first ``count`` packed sequences of the retrieval source ``name``."""
    packed = Packed(TOKENIZERS["chat"], make_mixture(name, texts), length, 0, hold_out=0)
    return list(islice(packed, count))


@parametrize_kind
def test_only_answers_have_labels(kind):
    (sequence,) = pack_sequences(f"retrieval:{kind}", count=1)
    token_ids, labels = sequence["input_ids"].tolist(), sequence["labels"].tolist()
    labelled_indices = [index for index, label in enumerate(labels) if label != IGNORED_LABEL]
    assert len(labelled_indices) == 5 * NUM_KEYS[kind]
    # labels are shifted: the label at an index is the token at the next index
    assert all(labels[index] == token_ids[index + 1] for index in labelled_indices)
    answer_indices = (labelled_indices[n : n + 5] for n in range(0, len(labelled_indices), 5))
    answers = [
        decode_without_spaces([token_ids[i + 1] for i in indices], "chat")
        for indices in answer_indices
    ]
    assert all(re.fullmatch(r"\d{5}", answer) for answer in answers)
    # each key occurs three times: twice in its statement, and once in the answer
    text = decode_without_spaces(token_ids, "chat")
    assert [text.count(answer) for answer in answers] == [3] * NUM_KEYS[kind]


@pytest.mark.parametrize("kind", TASKS)
def test_task_answers_have_labels(kind):
    (sequence,) = pack_sequences(f"retrieval:{kind}", count=1)
    document = make_document(kind, "chat")
    example = TASKS[kind].make(TOKENIZERS["chat"], SENTENCES, LENGTH, index=0, seed="finetune/0")
    assert document == (example.tokens, example.needles, example.answers)
    num_labelled = int((sequence["labels"] != IGNORED_LABEL).sum())
    assert num_labelled == sum(end - start for start, end in example.answers)


def test_document_kinds_alternate():
    sequences = pack_sequences("retrieval:passkey+recall+passkey", count=6)
    nums_labelled_keys = [
        int((sequence["labels"] != IGNORED_LABEL).sum()) // 5 for sequence in sequences
    ]
    assert nums_labelled_keys == [1, 12, 1, 1, 12, 1]


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


class Recorded(random.Random):
    """Random generator that appends its seed to the class attribute ``seeds``."""

    seeds: list = []

    def __init__(self, seed=None):
        self.seeds.append(seed)
        super().__init__(seed)


def test_training_seeds_differ_from_evaluation_seeds(monkeypatch):
    """Check that training seeds, which start with "finetune/", equal no evaluation seed."""
    monkeypatch.setattr(random, "Random", Recorded)
    tokenizer = TOKENIZERS["chat"]

    def seeds_of(function):
        """Return the seeds of all random generators that ``function`` creates."""
        monkeypatch.setattr(Recorded, "seeds", [])
        function()
        return set(map(str, Recorded.seeds))

    def evaluate():
        for seed in (-1, 0, 1, 12):
            make_recall_document(tokenizer, NOISE_SENTENCES, LENGTH, 12, index=0, seed=seed)
            make_plain_document(tokenizer, NOISE_SENTENCES, LENGTH, index=0, seed=seed)
            for keys in (1, 4):
                Haystack(tokenizer, keys=keys).prompt(LENGTH, 0.5, 0, seed)
            for task in TASKS.values():
                task.make(tokenizer, NOISE_SENTENCES, LENGTH, index=0, seed=seed)

    def train():
        for seed in (-1, 0, 1, 12):
            make_mixture = [(make_source(f"retrieval:{'+'.join(KINDS)}", seed=seed), 1)]
            packed = Packed(tokenizer, make_mixture, LENGTH, seed)
            for _ in KINDS:
                next(packed)
            pack_held_out(tokenizer, make_mixture, LENGTH, num_sequences=len(KINDS), seed=seed)

    evaluation_seeds, training_seeds = seeds_of(evaluate), seeds_of(train)
    assert all(re.match(r"-?\d+/", seed) for seed in evaluation_seeds)
    assert all(seed.startswith("finetune/") for seed in training_seeds)
    assert len(training_seeds) > 2 * 4 * len(KINDS)


@pytest.mark.parametrize("kind", (*NUM_KEYS, "repeats", "keys"))
def test_too_short_length_raises(kind):
    with pytest.raises(ValueError, match="must have room for"):
        make_document(kind, length=20)


@pytest.mark.parametrize("share", [0.3, 0.0], ids=["with text documents", "synthetic only"])
def test_synthetic_documents_are_not_split(share):
    tokenizer, num_synthetic, num_padded = TOKENIZERS["plain"], 0, 0
    pairs = make_mixture("retrieval:passkey+distractors+multi:260", SENTENCES * 3, share)
    for item in islice(Packed(tokenizer, pairs, 300, 0), 12):
        ids, positions, labels = (item[name].tolist() for name in item)
        starts = [index for index, position in enumerate(positions) if position == 0]
        sizes = [end - start for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
        first_words = (tokenizer.decode(ids[start : start + 3]) for start in starts)
        is_synthetic = [each.startswith(("There is an", "There are")) for each in first_words]
        assert {size for size, own in zip(sizes, is_synthetic, strict=True) if own} <= {260}
        num_synthetic += sum(is_synthetic)
        if not share:
            num_padded += 1
            assert labels[260:] == [IGNORED_LABEL] * 40
            assert ids[260:] == [tokenizer.pad_token_id] * 40
    assert num_synthetic >= 8
    assert num_padded == (0 if share else 12)


def test_held_out_retrieval_uses_held_out_text():
    numbered = [" ".join(["rained" if number % 10 else "nobody"] * 300) for number in range(40)]
    pairs, tokenizer = make_mixture("retrieval:passkey:200", numbered), TOKENIZERS["plain"]
    reserved = pack_held_out(tokenizer, pairs, 200, 4, hold_out=10)
    trained = list(islice(Packed(tokenizer, pairs, 200, 0, hold_out=10), 4))
    for items, word, other in ((reserved, "nobody", "rained"), (trained, "rained", "nobody")):
        texts = [tokenizer.decode(item["input_ids"]) for item in items]
        assert len(texts) == 4 and all(word in text and other not in text for text in texts)


def test_too_short_document_error_names_source():
    """Read 50 documents, because only later documents have sentences that do not fit."""
    with pytest.raises(UsageError, match="source 'retrieval:keys:25': length must .*, got 25"):
        pack_sequences("retrieval:keys:25", length=25, count=50)
