"""Data sources and packing: document order, mixture weights, resuming, held-out data, errors."""

import gzip
import json
import os
import re
import socket
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import datasets
import pytest
import torch
from tiny import FULL_BUDGET_CONFIG, make_tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from words import make_tokenizer

import cab_hf
from cab_hf.data.needles import PERSON_NAMES
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import sources
from cab_hf.finetune.data import SequencePacker, pack_held_out_sequences, prefetch_sequences
from cab_hf.finetune.prepare import open_data
from cab_hf.finetune.settings import Settings
from cab_hf.finetune.sources import find_first_held_out, make_source

WORD_TOKENIZER = make_tokenizer()
SEQUENCE_TOKENS = 48


@pytest.fixture(autouse=True)
def shuffle_in_blocks_of_8(monkeypatch, tmp_path_factory):
    """Shuffle streamed documents in blocks of 8, and use a temporary datasets cache."""
    # datasets would send download counts to the hub
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr(sources, "STREAM_BLOCK_TEXTS", 8)


def make_text(document_number):
    """Return a document as a string: ``document_number``, followed by 2 to 60 names."""
    rotated_names = PERSON_NAMES[document_number % len(PERSON_NAMES) :] + PERSON_NAMES
    return f"{document_number} " + " ".join(rotated_names[: 2 + document_number * 7 % 59])


def make_texts(num_texts):
    """Return a list of the documents `make_text(0)` to `make_text(num_texts - 1)`."""
    return [make_text(document_number) for document_number in range(num_texts)]


def make_memory_source(texts, **source_options):
    """Return a `TextSource` of a dataset in memory whose documents are ``texts``."""
    dataset = datasets.Dataset.from_dict({"text": texts})
    return sources.TextSource("memory", dataset, "text", **source_options)


def write_file(path, texts):
    """Write documents to a .parquet, .jsonl or .txt file, and return its path as a string."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        rows = {"text": texts, "n": [1] * len(texts)}
        datasets.Dataset.from_dict(rows).to_parquet(str(path))
    else:
        rows = (json.dumps({"text": document_text, "n": 1}) + "\n" for document_text in texts)
        path.write_text("".join(rows if path.suffix == ".jsonl" else texts))
    return str(path)


def write_folder(folder, suffix, texts):
    """Write documents to several files with this suffix, and return the path of their folder.

    The folder also has a README.md, which is not data.
    """
    texts_per_file = 1 if suffix == "txt" else -(-len(texts) // 3)
    for start in range(0, len(texts), texts_per_file):
        file_texts = texts[start : start + texts_per_file]
        write_file(folder / suffix / f"{start:03}.{suffix}", file_texts)
    (folder / suffix / "README.md").write_text("a description of the data")
    return str(folder / suffix)


def take_sequences(sequence_iterator, num_sequences):
    """Return a list of the next ``num_sequences`` sequences of a `SequencePacker` iterator."""
    return list(islice(sequence_iterator, num_sequences))


def assert_same_sequences(actual, expected):
    """Assert that two non-empty lists of sequences are bit-identical."""
    assert len(actual) == len(expected) > 0
    for actual_sequence, expected_sequence in zip(actual, expected, strict=True):
        assert actual_sequence.keys() == expected_sequence.keys()
        for tensor_name in actual_sequence:
            assert torch.equal(actual_sequence[tensor_name], expected_sequence[tensor_name]), (
                tensor_name
            )


def make_letter_tokenizer():
    """Return a tokenizer with a token per letter; `.` is end-of-text and `_` is padding."""
    vocabulary = {letter: index for index, letter in enumerate("_.abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=".", pad_token="_")


def spell_tokens(tokenizer, tokens):
    """Return a string with the letter of each token id, or `-` for an ignored label."""
    return "".join(
        "-" if token < 0 else tokenizer.convert_ids_to_tokens(int(token)) for token in tokens
    )


parametrize_streaming = pytest.mark.parametrize(
    "streaming", [False, True], ids=["indexed", "streaming"]
)
parametrize_file_suffix = pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])


def spell_sequences(texts, sequence_tokens, tokenizer=None):
    """Pack documents, and yield each sequence as a string "INPUT_IDS POSITION_IDS LABELS".

    Input ids and labels are letters (see `spell_tokens`), and position ids are digits.
    """
    tokenizer = tokenizer or make_letter_tokenizer()
    source = (
        texts
        if isinstance(texts, sources.TextSource)
        else make_memory_source(texts, is_shuffled=False)
    )
    for sequence in SequencePacker(tokenizer, [(source, 1)], sequence_tokens, 0, hold_out_every=0):
        assert {tensor.dtype for tensor in sequence.values()} == {torch.int64}
        positions = "".join(map(str, sequence["position_ids"].tolist()))
        ids, labels = (
            spell_tokens(tokenizer, sequence[tensor_name])
            for tensor_name in ("input_ids", "labels")
        )
        yield f"{ids} {positions} {labels}"


@pytest.mark.parametrize(
    ("sequence_tokens", "expected_spelling"),
    [
        (7, "abcde.f 0123450 bcde.-g  g.hijkl 0101234 .-ijklm  mno.abc 0123012 no.-bcd"),
        (8, "abcde.fg 01234501 bcde.-g.  hijklmno 01234567 ijklmno."),
        (4, "abcd 0123 bcde  e.fg 0101 .-g.  hijk 0123 ijkl"),
    ],
    ids=["cut document continues", "single last token is dropped", "document of two sequences"],
)
def test_documents_are_concatenated(sequence_tokens, expected_spelling):
    sequences = spell_sequences(["a b c d e", "f g", "h i j k l m n o"], sequence_tokens)
    assert "  ".join(islice(sequences, expected_spelling.count("  ") + 1)) == expected_spelling


def test_special_tokens_start_documents_but_not_continuations():
    tokenizer = make_letter_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        "z $A", special_tokens=[("z", tokenizer.convert_tokens_to_ids("z"))]
    )
    sequences = islice(spell_sequences(["a b c d", "e f"], 4, tokenizer), 3)
    assert [spelled_sequence.partition(" ")[0] for spelled_sequence in sequences] == [
        "zabc",
        "d.ze",
        "f.za",
    ]


@parametrize_streaming
def test_short_documents_are_skipped(streaming):
    source = make_memory_source(["a b c", "", "d"], is_shuffled=False)
    if streaming:
        source = replace(source, dataset=source.dataset.to_iterable_dataset())
    assert next(spell_sequences(source, 8)).partition(" ")[0] == "abc.abc."


@pytest.mark.parametrize("implementation", ["sdpa", "cab"])
def test_packed_logits_equal_single_document_logits(implementation):
    model = make_tiny_model(num_hidden_layers=2, vocab_size=len(WORD_TOKENIZER))
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    model.set_attn_implementation(implementation)
    source = make_memory_source(make_texts(12), is_shuffled=False)
    packer = SequencePacker(WORD_TOKENIZER, [(source, 1)], 150, 0, hold_out_every=0)

    @torch.no_grad()
    def compute_logits(ids, positions):
        return model(ids[None], position_ids=positions[None], use_cache=False).logits[0]

    for sequence in take_sequences(packer, 2):
        ids, positions = sequence["input_ids"], sequence["position_ids"]
        starts = (positions == 0).nonzero()[:, 0].tolist()
        assert len(starts) > 2
        packed_logits = compute_logits(ids, positions)
        for start, end in zip(starts, [*starts[1:], 150], strict=True):
            document_logits = compute_logits(ids[start:end], torch.arange(end - start))
            torch.testing.assert_close(
                packed_logits[start:end], document_logits, atol=2e-5, rtol=1e-4
            )
        # check of the test: if attention crosses document borders, the logits differ
        assert not torch.allclose(
            compute_logits(ids, torch.arange(150))[-1], packed_logits[-1], atol=1e-2
        )


RETRIEVAL_SOURCE_NAME = "retrieval:passkey+distractors+multi:260"


def test_sources_have_configured_token_shares():
    share_by_letter = {"a": 0.5, "b": 0.3, "c": 0.2}
    source_shares = [
        (make_memory_source([f"{letter} " * 20] * 9), share)
        for letter, share in share_by_letter.items()
    ]
    tokenizer = make_letter_tokenizer()
    packer = SequencePacker(tokenizer, source_shares, 64, 0, hold_out_every=0)
    letters = "".join(
        spell_tokens(tokenizer, sequence["input_ids"]) for sequence in take_sequences(packer, 40)
    )
    num_letters = len(letters) - letters.count(".")
    for letter, share in share_by_letter.items():
        assert letters.count(letter) / num_letters == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("mixture_kind", ["text", "text and retrieval"])
@parametrize_streaming
@parametrize_file_suffix
def test_killed_run_continues_at_same_sequence(tmp_path, suffix, streaming, mixture_kind):
    folder_name = write_folder(tmp_path, suffix, make_texts(40))

    def make_packer():
        source_shares = [(make_source(folder_name, streaming=streaming), 0.6)]
        source_shares += (
            [(make_source(RETRIEVAL_SOURCE_NAME), 0.4)]
            if mixture_kind == "text and retrieval"
            else []
        )
        return SequencePacker(WORD_TOKENIZER, source_shares, 280, 5, hold_out_every=10)

    packer, saved_states, sequences = make_packer(), [], []
    # read two epochs, and more
    while packer.epoch < 2 or len(sequences) % 5:
        saved_states.append(json.dumps(packer.state_dict()))
        sequences.append(next(packer))
    assert len(sequences) < 80
    for index in range(0, len(sequences), 3):
        # load the state into a new iterator, or into the advanced iterator
        resumed_packer = make_packer() if index % 2 else packer
        resumed_packer.load_state_dict(json.loads(saved_states[index]))
        assert json.dumps(resumed_packer.state_dict()) == saved_states[index]
        assert_same_sequences(
            take_sequences(resumed_packer, 4)[: len(sequences) - index],
            sequences[index : index + 4],
        )
    assert max(map(len, saved_states)) < 3000


@parametrize_streaming
def test_order_differs_per_epoch_and_seed(tmp_path, streaming):
    folder_name = write_folder(tmp_path, "jsonl", make_texts(40))

    def read_document_numbers(salt, is_shuffled=True, **source_options):
        """Return the numbers at the start of the documents, 40 for each of three epochs."""
        source = replace(
            make_source(folder_name, streaming=streaming, **source_options), is_shuffled=is_shuffled
        )
        text_iterator = sources.TextIterator(source, sources.DocumentFilter(0), str(salt))
        return [[int(next(text_iterator).split()[0]) for _ in range(40)] for _ in range(3)]

    document_numbers_with_salt_0, document_numbers_with_salt_1 = (
        read_document_numbers(0),
        read_document_numbers(1),
    )
    assert all(
        sorted(document_numbers_of_epoch) == list(range(40))
        for document_numbers_of_epoch in (
            *document_numbers_with_salt_0,
            *document_numbers_with_salt_1,
        )
    )
    assert document_numbers_with_salt_0 == read_document_numbers(0)
    assert (
        len(
            {
                tuple(document_numbers_of_epoch)
                for document_numbers_of_epoch in (
                    *document_numbers_with_salt_0,
                    *document_numbers_with_salt_1,
                )
            }
        )
        == 6
    )
    assert read_document_numbers(0, seed=1) != document_numbers_with_salt_0
    assert read_document_numbers(0, is_shuffled=False) == [list(range(40))] * 3


def make_text_and_retrieval():
    """Return a mixture as a list of (source, weight): documents, and retrieval documents."""
    return [(make_memory_source(make_texts(40)), 0.6), (make_source(RETRIEVAL_SOURCE_NAME), 0.4)]


@pytest.mark.parametrize("num_processes", [2, 4])
def test_order_is_independent_of_world_size(num_processes):
    sequences = take_sequences(
        SequencePacker(WORD_TOKENIZER, make_text_and_retrieval(), 280, 0), 12
    )
    packer_by_rank = [
        SequencePacker(
            WORD_TOKENIZER,
            make_text_and_retrieval(),
            280,
            0,
            rank=rank,
            num_processes=num_processes,
        )
        for rank in range(num_processes)
    ]
    for first_sequence in range(0, 12, num_processes):
        assert_same_sequences(
            list(map(next, packer_by_rank)),
            sequences[first_sequence : first_sequence + num_processes],
        )
        packer_states = [json.dumps(rank.state_dict()) for rank in packer_by_rank]
        assert len(set(packer_states)) == 1
    # the state of two processes can be loaded into one process
    packer = SequencePacker(WORD_TOKENIZER, make_text_and_retrieval(), 280, 0)
    take_sequences(packer_by_rank[0], 4)
    packer.load_state_dict(packer_by_rank[0].state_dict())
    expected_sequences = take_sequences(
        SequencePacker(WORD_TOKENIZER, make_text_and_retrieval(), 280, 0),
        12 + 4 * num_processes + 2,
    )[-2:]
    assert_same_sequences(take_sequences(packer, 2), expected_sequences)
    assert (
        packer.state_dict()
        != SequencePacker(WORD_TOKENIZER, make_text_and_retrieval(), 280, 0).state_dict()
    )


@pytest.mark.parametrize(("num_processes", "num_workers"), [(1, 0), (1, 1), (2, 1)])
def test_prefetching_keeps_sequences_and_state(num_processes, num_workers):
    def make_packer():
        return SequencePacker(
            WORD_TOKENIZER,
            make_text_and_retrieval(),
            280,
            0,
            rank=num_processes - 1,
            num_processes=num_processes,
        )

    expected_sequences, sequences_and_states = (
        take_sequences(make_packer(), 8),
        prefetch_sequences(make_packer(), num_workers=num_workers),
    )
    rng_state = torch.get_rng_state()
    sequences, states = zip(*take_sequences(sequences_and_states, 4), strict=True)
    assert_same_sequences(sequences, expected_sequences[:4])
    assert torch.equal(torch.get_rng_state(), rng_state)
    # a state that was saved with a DataLoader worker can be loaded without, and vice versa
    packer = make_packer()
    packer.load_state_dict(json.loads(json.dumps(states[-1])))
    assert packer.state_dict() == states[-1]
    sequences, _ = zip(
        *take_sequences(prefetch_sequences(packer, num_workers=1 - num_workers), 4), strict=True
    )
    assert_same_sequences(sequences, expected_sequences[4:])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_prefetch_error_raises_at_its_sequence(num_workers):
    packer = SequencePacker(WORD_TOKENIZER, [(make_memory_source([9]), 1)], 90, 0, hold_out_every=0)
    with pytest.raises(UsageError, match="must contain strings, got 9 in document 0"):
        next(prefetch_sequences(packer, num_workers=num_workers))


def find_document_numbers(sequences):
    """Return the set of four-digit numbers in the decoded sequences ``sequences``."""
    token_ids = torch.cat([sequence["input_ids"] for sequence in sequences])
    spaced_numbers = re.findall(r"(?<!\d )(\d \d \d \d)(?! \d)", WORD_TOKENIZER.decode(token_ids))
    return {spaced_number.replace(" ", "") for spaced_number in spaced_numbers}


@parametrize_streaming
def test_training_excludes_held_out_documents(tmp_path, streaming):
    numbered_texts = [make_text(1000 + number) for number in range(60)]
    source = make_source(write_folder(tmp_path, "jsonl", numbered_texts), streaming=streaming)
    for seed in (0, 1):
        packer_arguments = {
            "tokenizer": WORD_TOKENIZER,
            "source_shares": [(source, 1)],
            "sequence_tokens": SEQUENCE_TOKENS,
            "seed": seed,
        }
        held_out_sequences = pack_held_out_sequences(
            num_sequences=99, hold_out_every=10, **packer_arguments
        )
        packer = SequencePacker(hold_out_every=10, **packer_arguments)
        training_sequences = []
        while packer.epoch < 2:
            training_sequences.append(next(packer))
        held_out_numbers = {str(1000 + number) for number in range(0, 60, 10)}
        assert find_document_numbers(held_out_sequences) == held_out_numbers
        # fewer than 8 of 99 sequences: `pack_held_out_sequences` stops after all held-out documents
        assert len(held_out_sequences) < 8
        assert (
            find_document_numbers(training_sequences)
            == {str(1000 + number) for number in range(60)} - held_out_numbers
        )
        assert_same_sequences(
            pack_held_out_sequences(num_sequences=99, hold_out_every=10, **packer_arguments),
            held_out_sequences,
        )
        assert_same_sequences(
            pack_held_out_sequences(num_sequences=2, hold_out_every=10, **packer_arguments),
            held_out_sequences[:2],
        )
    # hold_out_every=1 holds out all documents
    held_out_sequences = pack_held_out_sequences(
        WORD_TOKENIZER, [(source, 1)], SEQUENCE_TOKENS, 99, hold_out_every=1
    )
    assert find_document_numbers(held_out_sequences) == {str(1000 + number) for number in range(60)}


@parametrize_streaming
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
@pytest.mark.parametrize("leading_texts", [[""], ["a"], ["", " \n", "a", "", ""]], ids=repr)
def test_first_non_empty_document_is_held_out(tmp_path, suffix, streaming, leading_texts):
    numbered_texts = [make_text(1000 + number) for number in range(25)]
    source_name = write_folder(tmp_path, suffix, [*leading_texts, *numbered_texts])
    source = make_source(source_name, streaming=streaming)
    # one of 4 documents is held out
    first_held_out_index = len(leading_texts) % 4
    expected_held_out_numbers = {
        str(1000 + number)
        for number in range(25)
        if (number + len(leading_texts)) % 4 == first_held_out_index
    }
    held_out_sequences = pack_held_out_sequences(
        WORD_TOKENIZER, [(source, 1)], SEQUENCE_TOKENS, 99, hold_out_every=4
    )
    packer, training_sequences = (
        SequencePacker(WORD_TOKENIZER, [(source, 1)], SEQUENCE_TOKENS, 0, hold_out_every=4),
        [],
    )
    while packer.epoch < 2:
        training_sequences.append(next(packer))
    assert (
        find_document_numbers(held_out_sequences) == expected_held_out_numbers
        and "1000" in expected_held_out_numbers
    )
    assert (
        find_document_numbers(training_sequences)
        == {str(1000 + number) for number in range(25)} - expected_held_out_numbers
    )
    assert find_first_held_out(source, WORD_TOKENIZER, 4) == first_held_out_index


@pytest.mark.parametrize(
    ("num_documents", "notice_pattern"),
    [(12, "1 of 13 documents"), (250, r"3 of 251 documents .* and every 100th after it")],
)
def test_run_reports_held_out_documents(tmp_path, num_documents, notice_pattern):
    file_name = write_file(tmp_path / "a.jsonl", ["", *make_texts(num_documents)])
    printed_notices = []
    open_data(
        settings=Settings(data=(file_name,), length=SEQUENCE_TOKENS, held_out=1),
        tokenizer=WORD_TOKENIZER,
        parallelism=SimpleNamespace(replica_index=0, num_replicas=1),
        print_notice=printed_notices.append,
        vocabulary_size=len(WORD_TOKENIZER),
    )
    (notice,) = printed_notices
    assert re.match(rf"source 'a.jsonl': {notice_pattern}", notice) and "(document 2" in notice


@pytest.mark.parametrize(
    ("texts", "only_held_out", "message"),
    [
        (["", "a b c", "", "a"], False, "must contain documents that are not held out, of two"),
        (["", "a", ""], True, "must contain held-out documents of two tokens or more"),
        (["", "a", ""], False, "of two tokens or more.* use --held-out 0"),
    ],
)
def test_empty_documents_error_names_split(texts, only_held_out, message):
    packer = SequencePacker(
        WORD_TOKENIZER,
        [(make_memory_source(texts), 1)],
        SEQUENCE_TOKENS,
        0,
        only_held_out=only_held_out,
    )
    with pytest.raises(UsageError, match=message):
        next(packer)


@pytest.mark.parametrize("token_kind", ["text", "end-of-text"])
def test_token_outside_of_vocabulary_raises(token_kind):
    tokenizer = make_letter_tokenizer()
    tokenizer.add_tokens("<more>")
    if token_kind == "end-of-text":
        tokenizer.eos_token = "<more>"
    added_token = len(tokenizer) - 1
    source_shares = [
        (make_memory_source(["a b c <more>" if token_kind == "text" else "a b c"] * 3), 1)
    ]
    packer = SequencePacker(
        tokenizer, source_shares, 8, 0, hold_out_every=0, vocabulary_size=added_token
    )
    with pytest.raises(UsageError, match=rf"data must .*, got token {added_token} \('<more>'\)"):
        next(packer)
    next(
        SequencePacker(
            tokenizer, source_shares, 8, 0, hold_out_every=0, vocabulary_size=added_token + 1
        )
    )
    # the padding token exceeds the vocabulary, so another token pads sequences
    tokenizer = make_letter_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    source_shares = [(make_source("retrieval:keys:70"), 1)]
    packer = SequencePacker(tokenizer, source_shares, 80, 0, vocabulary_size=len(tokenizer) - 1)
    assert next(packer)["input_ids"][70:].tolist() == [tokenizer.eos_token_id] * 10


def test_hub_names_load_through_datasets(monkeypatch):
    load_calls = []

    def load_dataset(*load_arguments, **load_options):
        load_calls.append((load_arguments, load_options))
        return datasets.Dataset.from_dict({"story": make_texts(9), "title": ["a"] * 9})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset_builder = SimpleNamespace(hash="a commit")
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *arguments: dataset_builder)
    source = make_source("someone/books:small", text_field="story", split="validation")
    arguments = ("someone/books", "small")
    assert load_calls == [(arguments, {"split": "validation", "streaming": False})]
    assert source.sha256 == "a commit" and source.dataset.column_names == ["story"]


def read_documents(source_name, streaming=False):
    """Return the list of all documents of a source, in the order of its files."""
    source = make_source(str(source_name), streaming=streaming)
    return [row["text"] for row in source.dataset]


@parametrize_streaming
@parametrize_file_suffix
@pytest.mark.parametrize(
    ("path_pattern", "matching_path"), [("d[1]/a", "d1/a"), ("a?", "ab"), ("**/a", "c/a")]
)
def test_path_is_not_expanded_as_glob(tmp_path, suffix, path_pattern, matching_path, streaming):
    for path_without_suffix in (path_pattern, matching_path):
        write_file(tmp_path / f"{path_without_suffix}.{suffix}", [path_without_suffix])
    assert read_documents(tmp_path / f"{path_pattern}.{suffix}", streaming) == [path_pattern]
    if "/" in path_pattern and "*" not in path_pattern:
        assert read_documents((tmp_path / path_pattern).parent, streaming) == [path_pattern]


def test_fingerprint_depends_on_content_only(tmp_path):
    """Compare equal content under other file names, folders and time stamps."""
    fingerprints, texts_of_folders = [], []
    for folder, texts in (("one", "abcd"), ("two", "abcd"), ("three", "bacd")):
        for file_number, text in enumerate(texts):
            file = write_file(tmp_path / folder / f"{folder}-{file_number}.txt", [text])
            os.utime(file, (1.7e9, 1.7e9))
        fingerprints.append(make_source(str(tmp_path / folder)).sha256)
        texts_of_folders.append(read_documents(tmp_path / folder))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert texts_of_folders == [[*"abcd"], [*"abcd"], [*"bacd"]]


TEXT_BY_HIDDEN_OR_VISIBLE_FILE = {
    ".checkpoints/a": "old",
    ".a": "old",
    "b/.old/c/a": "old",
    "b.txt/a": "\ufeffnew",
}


def test_folder_is_read_recursively_without_hidden_files(tmp_path):
    folder = tmp_path / ".shown"
    # one file has a byte order mark, which must be removed
    for path_without_suffix, text in TEXT_BY_HIDDEN_OR_VISIBLE_FILE.items():
        write_file(folder / f"{path_without_suffix}.txt", [text])
    assert read_documents(folder) == ["new"]


LINE_WITHOUT_TEXT = json.dumps({"content": "a b c", "title": "x"}) + "\n"


def format_row(text):
    """Return the line of a .jsonl file for one document."""
    return json.dumps({"text": text}) + "\n"


@parametrize_streaming
@pytest.mark.parametrize(
    ("content_by_file", "message"),
    [
        pytest.param({"a.txt": ""}, "'.*a.txt' must contain documents", id="empty text"),
        pytest.param({"a.jsonl": ""}, "'.*a.jsonl' must contain documents", id="empty jsonl"),
        pytest.param(
            {"a.jsonl": LINE_WITHOUT_TEXT}, "no field 'text'; known are content", id="no field"
        ),
        pytest.param({"a.jsonl": '{"txt": "a"}\n'}, "did you mean txt?", id="near field"),
        pytest.param({"a.txt": b"\xff\xfe\x00bin"}, "cannot be read .*codec", id="binary"),
        pytest.param({"a.jsonl": "{not json"}, "cannot be read", id="no json"),
        pytest.param({"a.parquet": "PAR0"}, "cannot be read", id="no parquet"),
        pytest.param({"a.csv": "text"}, "must be a file of .txt, .jsonl", id="another kind"),
        pytest.param({"a.jsonl": format_row(7)}, "'text' .* got 7 in document 0", id="numbers"),
        pytest.param({"a.jsonl": format_row(None)}, "documents of two tokens or more", id="null"),
        pytest.param({"a.jsonl": format_row("It")}, "documents of two tokens or more", id="short"),
        pytest.param({"a.txt": gzip.compress(b"a b")}, "a.txt is compressed", id="compressed"),
        pytest.param({"a.txt": None}, "must be an existing file or folder, got", id="gone"),
        pytest.param({".": ""}, "got no files", id="empty folder"),
        pytest.param(
            {".": "", "b.jsonl": LINE_WITHOUT_TEXT, "a.txt": "a"}, "got .jsonl and .txt", id="kinds"
        ),
        pytest.param({".": "", "a.txt": "a", "b.txt": None}, "b.txt", id="a link to nothing"),
        pytest.param({".": "", "2.txt": b"\xe9"}, "\\(2.txt: 'utf-8' codec", id="which text"),
        pytest.param({".": "", "2.jsonl": "{not"}, "\\(2.jsonl: JSON parse error", id="which json"),
        pytest.param(
            {".": "", "2.jsonl": LINE_WITHOUT_TEXT},
            "\\(2.jsonl: there are 2 new",
            id="which fields",
        ),
    ],
)
def test_unreadable_data_raises(tmp_path, content_by_file, message, streaming):
    """Write files and read the first as a source; the content None stands for a broken link."""
    suffix = [*content_by_file][-1].rpartition(".")[2]
    if "2" in "".join(content_by_file):
        content_by_file |= {
            f"{file_number}.{suffix}": "a b" if suffix == "txt" else format_row("a b")
            for file_number in "13"
        }
    for file_name, content in content_by_file.items():
        if content is None:
            (tmp_path / file_name).symlink_to(tmp_path / "gone")
        elif file_name != ".":
            (tmp_path / file_name).write_bytes(
                content if type(content) is bytes else content.encode()
            )
    with pytest.raises(UsageError, match=message) as error_info:
        source = make_source(str(tmp_path / next(iter(content_by_file))), streaming=streaming)
        take_sequences(SequencePacker(WORD_TOKENIZER, [(source, 1)], 20, 0, hold_out_every=0), 3)
    assert len(str(error_info.value).splitlines()) == 1


@pytest.mark.parametrize(
    "source_name", ["none.jsonl", "./none", "/nowhere/a", "text", "folder:main"]
)
def test_missing_path_raises_without_hub_request(tmp_path, monkeypatch, source_name):
    """Check names for which `datasets.load_dataset` would read the working directory."""
    write_file(tmp_path / "folder" / "a.txt", ["a b c"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=f"must be an existing file or folder, got '{source_name}'"
    ):
        make_source(source_name)


@pytest.mark.parametrize(
    ("training_source", "validation_source", "is_refused"),
    [
        *(("a.txt", "a.txt", True), ("a.txt", "copy.txt", True), ("a.txt", "texts", True)),
        # no overlap: other content of the same length, synthetic documents, a training weight of 0
        *(("a.txt", "b.txt", False), ("retrieval:passkey:256", "retrieval:passkey:256", False)),
        ("a.txt=0", "a.txt", False),
    ],
)
def test_validation_on_training_source_raises(
    tmp_path, monkeypatch, training_source, validation_source, is_refused
):
    for file_name in ("a.txt", "copy.txt", "texts/inside.txt"):
        write_file(tmp_path / file_name, ["It rained."])
    write_file(tmp_path / "b.txt", ["It snowed."])
    monkeypatch.chdir(tmp_path)
    file_name, _, share = training_source.partition("=")
    training_pairs = [(make_source(file_name), float(share or 1))]
    validation_pairs = [(make_source(validation_source), 1.0)]
    with (
        pytest.raises(UsageError, match="validation must .* 'a.txt'")
        if is_refused
        else nullcontext()
    ):
        sources.refuse_overlap(training_pairs, validation_pairs)


@parametrize_file_suffix
@parametrize_streaming
def test_local_files_make_no_network_request(tmp_path, monkeypatch, suffix, streaming):
    requested_hosts = []

    def refuse_lookup(host, *_, **__):
        requested_hosts.append(host)
        raise socket.gaierror

    # restore the defaults of datasets, which allow network requests
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse_lookup)
    source = make_source(write_folder(tmp_path, suffix, make_texts(9)), streaming=streaming)
    take_sequences(SequencePacker(WORD_TOKENIZER, [(source, 1)], SEQUENCE_TOKENS, 0), 3)
    assert requested_hosts == []


@pytest.mark.parametrize(
    ("source_name", "share", "hold_out_every", "message"),
    [
        ("", 0, 100, "data must contain a source"),
        ("", 1, 1, "no documents if one in 1 is held out"),
        ("", 1, 0, "has no held-out documents if none"),
        ("retrieval:passkey:99", 1, 100, "at most 48 tokens, .*, got 99"),
        ("retrieval:passkey:40", 1, 100, "length must have room .*, got 40"),
        ("retrieval", 1, 100, "known kinds, got ''"),
        ("retrieval:passkeys", 1, 100, "got 'passkeys' in .* did you mean passkey"),
        ("retrieval:passkey+x", 1, 100, "known are passkey, distractors"),
        ("retrieval:passkey:8k", 1, 100, "a number of tokens as LENGTH"),
        ("retrieval:passkey:0", 1, 100, "a number of tokens as LENGTH"),
        ("retrieval:passkey:9:9", 1, 100, "must be retrieval:KINDS:LENGTH"),
    ],
)
def test_invalid_settings_raise(source_name, share, hold_out_every, message):
    with pytest.raises(UsageError, match=message):
        source_shares = [
            (make_source(source_name) if source_name else make_memory_source(make_texts(9)), share)
        ]
        SequencePacker(
            WORD_TOKENIZER,
            source_shares,
            SEQUENCE_TOKENS,
            0,
            hold_out_every=hold_out_every,
            only_held_out=not hold_out_every,
        )
