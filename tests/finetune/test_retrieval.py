"""Training documents for retrieval: wording of the evaluations, but other documents."""

import random
import re
from itertools import islice

import datasets
import pytest
from words import CHAT, TEXT, make_tokenizer

from cab_hf.data import needles
from cab_hf.data.documents import plain_document, recall_document
from cab_hf.data.needles import DISTRACTORS, NOISE, split_sentences
from cab_hf.data.tasks import TASKS
from cab_hf.eval.haystack import Haystack
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import sources
from cab_hf.finetune.data import Packed, held_out
from cab_hf.finetune.loss import IGNORED
from cab_hf.finetune.retrieval import KEYS, KINDS, retrieval_document
from cab_hf.finetune.sources import make_source

LENGTH = 900
TOKENIZERS = {"plain": make_tokenizer(), "chat": make_tokenizer(CHAT)}
SENTENCES = split_sentences(TEXT)
kinds = pytest.mark.parametrize("kind", KEYS)


def text_of(tokens, tokenizer="plain"):
    """Decode without spaces, which a tokenizer of words puts between digits."""
    return TOKENIZERS[tokenizer].decode(tokens).replace(" ", "")


def document_of(kind, tokenizer="plain", length=LENGTH, index=0, seed=0):
    return retrieval_document(kind, TOKENIZERS[tokenizer], SENTENCES, length, index, seed)


@kinds
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_each_key_is_stated_once_and_answered_after(kind, tokenizer):
    for length in (LENGTH, LENGTH + 7):
        document = document_of(kind, tokenizer, length)
        tokens = document.tokens
        assert len(tokens) == length
        assert len(document.needles) == len(document.answers) == KEYS[kind]
        for needle, answer in zip(document.needles, document.answers, strict=True):
            stated = text_of(tokens[slice(*needle)], tokenizer)
            said = re.fullmatch(r"Thepasskey(?:for(\w+))?is(\d+)\.Rememberit\..*", stated)
            whose, key = said.groups()
            assert (whose is None) == (KEYS[kind] == 1)
            assert text_of(tokens[slice(*answer)], tokenizer) == key
            before = text_of(tokens[answer[0] - 30 : answer[0]], tokenizer)
            assert before.endswith(f"thepasskeyfor{whose}is" if kind == "recall" else "is")
            assert needle[1] < answer[0]


@pytest.mark.parametrize("kind", ["passkey", "multi"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_final_question_has_wording_of_evaluation(kind, tokenizer):
    document = document_of(kind, tokenizer)
    haystack = Haystack(TOKENIZERS[tokenizer], keys=KEYS[kind])
    stated = text_of(document.tokens[slice(*document.needles[-1])], tokenizer)
    whose = re.match(r"Thepasskeyfor([A-Z][a-z]+)is", stated)
    whose = f" for {whose[1]}" if whose else ""
    # a prompt whose text is a mark alone
    mark = "Here we go."
    parts = haystack.render(whose, [], [mark]).split(mark)
    before, after = (text_of(haystack.encode(part), tokenizer) for part in parts)
    read = text_of(document.tokens[: document.answers[-1][0]], tokenizer)
    assert read.startswith(before) and read.endswith(after)


def test_distractors_differ_from_answers():
    def numbers(kind):
        document = document_of(kind, length=2000)
        read = text_of(document.tokens)
        key = text_of(document.tokens[slice(*document.answers[0])])
        return read, set(re.findall(r"\d{5}", read)) - {key}

    assert numbers("passkey")[1] == set()
    read, others = numbers("distractors")
    assert len(others) > 5
    worded = [each.replace(" ", "").partition("{}")[0] for each in DISTRACTORS]
    assert all(any(f"{each}{number}" in read for each in worded) for number in others)


@pytest.mark.parametrize("length", [LENGTH, 4001])
def test_repetitions_are_reordered(length):
    document = document_of("repeats", length=length)
    assert len(document.tokens) == length
    keys, sentences = [], set()
    for needle, answer in zip(document.needles, document.answers, strict=True):
        assert needle[1] <= length // 2 < answer[0]
        stated, labelled = (document.tokens[slice(*span)] for span in (needle, answer))
        # the words that identify a statement directly precede its labelled answer
        key = re.fullmatch(r"Thepasskeyfor(\w+)is(\d{5})\.", text_of(stated))
        num_identifying = len(stated) - 6 if key else 3
        end = answer[0] + len(stated) - num_identifying
        assert document.tokens[answer[0] - num_identifying : end] == stated
        if key:
            keys.append(key[1])
            assert text_of(labelled) == key[2]
        else:
            sentences.add(text_of(stated))
            assert labelled == stated[3:]
    # the shortest filler sentence is not longer than the prefix that identifies a sentence
    assert {each.replace(" ", "") for each in SENTENCES} - {"askednobody."} == sentences
    assert any(each in needles.NAMES for each in keys)
    assert any(each.startswith("locker") for each in keys) and len(keys) == len({*keys}) > 20
    assert list(document.needles) != sorted(document.needles)


@kinds
@pytest.mark.parametrize("change", ["index", "seed", "length"])
def test_document_depends_on_seed_and_index_only(kind, change):
    place = {"index": 1, "seed": 0, "length": LENGTH}
    document = document_of(kind, **place)
    assert document == document_of(kind, **place)
    other = document_of(kind, **{**place, change: place[change] + 1})

    def keys(actual):
        return {actual.tokens[start:end] for start, end in actual.answers}

    assert keys(other) != keys(document)


def mixture(name, texts=(), share=0.0, **options):
    """Return a source and, as ``share`` of the tokens, the text that its keys are hidden in."""
    beside = []
    if texts:
        dataset = datasets.Dataset.from_dict({"text": list(texts)})
        beside = [(sources.TextSource("beside", dataset, "text"), share)]
    return [(make_source(name, **options), 1 - share), *beside]


def read_of(name, texts=(), length=LENGTH, count=4):
    packed = Packed(TOKENIZERS["chat"], mixture(name, texts), length, 0, hold_out=0)
    return list(islice(packed, count))


@kinds
def test_only_answers_have_labels(kind):
    (item,) = read_of(f"retrieval:{kind}", count=1)
    ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
    labelled = [at for at, label in enumerate(labels) if label != IGNORED]
    assert len(labelled) == 5 * KEYS[kind]
    # shifted: a label is the next token
    assert all(labels[at] == ids[at + 1] for at in labelled)
    fives = (labelled[n : n + 5] for n in range(0, len(labelled), 5))
    answers = [text_of([ids[at + 1] for at in five], "chat") for five in fives]
    assert all(re.fullmatch(r"\d{5}", answer) for answer in answers)
    # stated twice in its needle, and once more where it is labelled
    read = text_of(ids, "chat")
    assert [read.count(answer) for answer in answers] == [3] * KEYS[kind]


@pytest.mark.parametrize("kind", TASKS)
def test_task_answers_have_labels(kind):
    (item,) = read_of(f"retrieval:{kind}", count=1)
    document, seed = document_of(kind, "chat"), "finetune/0"
    example = TASKS[kind].make(TOKENIZERS["chat"], SENTENCES, LENGTH, 0, seed)
    assert document == (example.tokens, example.needles, example.answers)
    labelled = int((item["labels"] != IGNORED).sum())
    assert labelled == sum(end - start for start, end in example.answers)


def test_document_kinds_alternate():
    items = read_of("retrieval:passkey+recall+passkey", count=6)
    labelled = [int((item["labels"] != IGNORED).sum()) // 5 for item in items]
    assert labelled == [1, 12, 1, 1, 12, 1]


@pytest.mark.parametrize(
    "texts",
    [
        # longer and shorter than a document
        *(["The old town slept! " * 300], ["The old town slept!"] * 50),
        # without sentences, and some blank
        *(["old town slept " * 900], ["", " ", "The old town slept! " * 90]),
    ],
)
def test_keys_are_inserted_into_text_of_other_sources(texts):
    for item in read_of("retrieval:passkey+recall", texts):
        read = text_of(item["input_ids"], "chat")
        assert read.count("oldtownslept") > 20
        assert "grassisgreen" not in read


class Recorded(random.Random):
    """Random generator that records its seeds."""

    seeds: list = []

    def __init__(self, seed=None):
        self.seeds.append(seed)
        super().__init__(seed)


def test_training_seeds_differ_from_evaluation_seeds(monkeypatch):
    """Evaluation seeds start with an integer; training seeds start with "finetune/"."""
    monkeypatch.setattr(random, "Random", Recorded)
    words, drawn = TOKENIZERS["chat"], {}

    def record(name, draw):
        monkeypatch.setattr(Recorded, "seeds", [])
        draw()
        drawn[name] = set(map(str, Recorded.seeds))

    def evaluate():
        for seed in (-1, 0, 1, 12):
            recall_document(words, NOISE, LENGTH, 12, 0, seed)
            plain_document(words, NOISE, LENGTH, 0, seed)
            for keys in (1, 4):
                Haystack(words, keys=keys).prompt(LENGTH, 0.5, 0, seed)
            for task in TASKS.values():
                task.make(words, NOISE, LENGTH, 0, seed)

    def train():
        for seed in (-1, 0, 1, 12):
            mixture = [(make_source(f"retrieval:{'+'.join(KINDS)}", seed=seed), 1)]
            packed = Packed(words, mixture, LENGTH, seed)
            for _ in KINDS:
                next(packed)
            held_out(words, mixture, LENGTH, len(KINDS), seed)

    record("evaluations", evaluate)
    record("training", train)
    assert all(re.match(r"-?\d+/", seed) for seed in drawn["evaluations"])
    assert all(seed.startswith("finetune/") for seed in drawn["training"])
    assert len(drawn["training"]) > 2 * 4 * len(KINDS)


@pytest.mark.parametrize("kind", (*KEYS, "repeats", "keys"))
def test_too_short_length_raises(kind):
    with pytest.raises(ValueError, match="must have room for"):
        document_of(kind, length=20)


@pytest.mark.parametrize("share", [0.3, 0.0], ids=["text beside", "no text beside"])
def test_synthetic_documents_are_not_split(share):
    words, complete, padded = TOKENIZERS["plain"], 0, 0
    mixed = mixture("retrieval:passkey+distractors+multi:260", SENTENCES * 3, share)
    for item in islice(Packed(words, mixed, 300, 0), 12):
        ids, positions, labels = (item[name].tolist() for name in item)
        starts = [at for at, position in enumerate(positions) if position == 0]
        sizes = [end - at for at, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
        read = (words.decode(ids[at : at + 3]) for at in starts)
        begun = [each.startswith(("There is an", "There are")) for each in read]
        assert {size for size, own in zip(sizes, begun, strict=True) if own} <= {260}
        complete += sum(begun)
        if not share:
            padded += 1
            assert labels[260:] == [IGNORED] * 40
            assert ids[260:] == [words.pad_token_id] * 40
    assert complete >= 8
    assert padded == (0 if share else 12)


def test_held_out_retrieval_uses_held_out_text():
    numbered = [" ".join(["rained" if number % 10 else "nobody"] * 300) for number in range(40)]
    mixed, words = mixture("retrieval:passkey:200", numbered), TOKENIZERS["plain"]
    kept = held_out(words, mixed, 200, 4, hold_out=10)
    trained = list(islice(Packed(words, mixed, 200, 0, hold_out=10), 4))
    for items, own, other in ((kept, "nobody", "rained"), (trained, "rained", "nobody")):
        read = [words.decode(item["input_ids"]) for item in items]
        assert len(read) == 4 and all(own in text and other not in text for text in read)


def test_too_short_document_error_names_source():
    """The first document fits, but a later one draws longer sentences."""
    with pytest.raises(UsageError, match="source 'retrieval:keys:25': length must .*, got 25"):
        read_of("retrieval:keys:25", length=25, count=50)
