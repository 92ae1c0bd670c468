"""Documents as sequences: what stands where, whose share it is, and that a kill changes nothing."""

import codecs
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
from tiny import FULL, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from words import make_tokenizer

import cab_hf
from cab_hf.finetune import data, sources
from cab_hf.finetune.data import Packed, held_out, prefetched
from cab_hf.finetune.sources import make_source
from cab_hf.runs.settings import UsageError
from cab_hf.texts.needles import NAMES

EXACT = {"atol": 2e-5, "rtol": 1e-4}
TOKENIZER = make_tokenizer()
LENGTH = 48


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path_factory):
    """So that a few dozen documents are several blocks."""
    # what datasets makes of files is nobody's but the test's, and nobody is told
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr(sources, "BLOCK_STREAMED", 8)


def text(number):
    """The document of a number: its digits, and names from 2 to about 60."""
    names = NAMES[number % len(NAMES) :] + NAMES
    return f"{number} " + " ".join(names[: 2 + number * 7 % 59])


def texts_of(count):
    return [text(number) for number in range(count)]


def tokens_of(text):
    return [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]


def in_memory(texts, **options):
    dataset = datasets.Dataset.from_dict({"text": texts})
    return sources.TextSource("memory", dataset, "text", **options)


def written(folder, ending, texts):
    """A name of a source with these texts, in three files of one kind."""
    folder = folder / ending
    folder.mkdir()
    (folder / "README.md").write_text("what these are")
    for part in range(3):
        some = texts[part * len(texts) // 3 : (part + 1) * len(texts) // 3]
        file = folder / f"{part}.{ending}"
        if ending == "txt":
            for number, each in enumerate(some):
                (folder / f"{part}-{number:03}.txt").write_text(each)
        elif ending == "jsonl":
            file.write_text("".join(json.dumps({"text": each, "n": 1}) + "\n" for each in some))
        else:
            datasets.Dataset.from_dict({"text": some, "n": [1] * len(some)}).to_parquet(file)
    return str(folder)


def firsts(packed, count):
    return list(islice(packed, count))


def assert_same(actual, expected):
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


def letters():
    """A tokenizer whose tokens are letters, `.` the end of a document and `_` padding."""
    vocabulary = {letter: at for at, letter in enumerate("_.abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=".", pad_token="_")


def spelled(tokenizer, tokens):
    """Tokens as letters, `-` where a label is ignored."""
    return "".join("-" if t < 0 else tokenizer.convert_ids_to_tokens(int(t)) for t in tokens)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        pytest.param(
            7,
            [
                ("abcde.f", "0123450", "bcde.-g"),
                ("g.hijkl", "0101234", ".-ijklm"),
                ("mno.abc", "0123012", "no.-bcd"),
            ],
            id="rests go on",
        ),
        pytest.param(
            8,
            [("abcde.fg", "01234501", "bcde.-g."), ("hijklmno", "01234567", "ijklmno.")],
            id="a last token has been predicted",
        ),
        pytest.param(
            4,
            [("abcd", "0123", "bcde"), ("e.fg", "0101", ".-g."), ("hijk", "0123", "ijkl")],
            id="shorter than a document",
        ),
    ],
)
def test_documents_stand_one_behind_the_other(length, expected):
    tokenizer = letters()
    source = in_memory(["a b c d e", "f g", "h i j k l m n o"], shuffle=False)
    packed = Packed(tokenizer, [(source, 1.0)], length, 0, hold_out=0)
    for ids, positions, labels in expected:
        result = next(packed)
        assert spelled(tokenizer, result["input_ids"]) == ids
        assert "".join(map(str, result["position_ids"].tolist())) == positions
        assert spelled(tokenizer, result["labels"]) == labels
        assert {x.dtype for x in result.values()} == {torch.int64}


def test_special_tokens_begin_a_text_and_not_its_rest():
    tokenizer = letters()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        "z $A", special_tokens=[("z", tokenizer.convert_tokens_to_ids("z"))]
    )
    source = in_memory(["a b c d", "e f"], shuffle=False)
    packed = Packed(tokenizer, [(source, 1)], 4, 0, hold_out=0)
    actual = [spelled(tokenizer, item["input_ids"]) for item in firsts(packed, 3)]
    assert actual == ["zabc", "d.ze", "f.za"]


@pytest.mark.parametrize("implementation", ["sdpa", "cab"])
def test_packed_documents_answer_as_they_do_alone(implementation):
    model = tiny_model(num_hidden_layers=2, vocab_size=len(TOKENIZER))
    cab_hf.apply_cab(model, FULL)
    model.set_attn_implementation(implementation)
    source = in_memory(texts_of(12), shuffle=False)
    packed = Packed(TOKENIZER, [(source, 1)], 150, 0, hold_out=0)

    @torch.no_grad()
    def logits(ids, positions):
        row = {"input_ids": ids[None], "position_ids": positions[None]}
        return model(**row, use_cache=False).logits[0]

    for item in firsts(packed, 2):
        ids, positions = item["input_ids"], item["position_ids"]
        starts = (positions == 0).nonzero()[:, 0].tolist()
        assert len(starts) > 2
        actual = logits(ids, positions)
        for start, end in zip(starts, [*starts[1:], 150], strict=True):
            alone = logits(ids[start:end], torch.arange(end - start))
            torch.testing.assert_close(actual[start:end], alone, **EXACT)
        # as one document they are another text
        assert not torch.allclose(logits(ids, torch.arange(150))[-1], actual[-1], atol=1e-2)


RETRIEVAL = "retrieval:passkey+distractors+multi:260"


def test_sources_have_their_shares_of_the_tokens():
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    mixed = [(in_memory([f"{name} " * 20] * 9), share) for name, share in shares.items()]
    tokenizer = letters()
    packed = Packed(tokenizer, mixed, 64, 0, hold_out=0)
    seen = "".join(spelled(tokenizer, item["input_ids"]) for item in firsts(packed, 40))
    for name, share in shares.items():
        assert seen.count(name) / (len(seen) - seen.count(".")) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("share", [0.3, 0.0], ids=["text beside", "no text beside"])
def test_synthetic_documents_are_never_cut(share):
    mixed = [(in_memory(texts_of(20)), share), (make_source(RETRIEVAL), 0.7)]
    complete, padded = 0, 0
    for item in firsts(Packed(TOKENIZER, mixed, 300, 0), 12):
        ids, positions, labels = (item[name].tolist() for name in item)
        starts = [at for at, position in enumerate(positions) if position == 0]
        sizes = [end - at for at, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
        read = (TOKENIZER.decode(ids[at : at + 3]) for at in starts)
        begun = [each.startswith(("There is an", "There are")) for each in read]
        assert {size for size, own in zip(sizes, begun, strict=True) if own} <= {260}
        complete += sum(begun)
        if not share:
            padded += 1
            assert labels[260:] == [data.IGNORED] * 40
            assert ids[260:] == [TOKENIZER.pad_token_id] * 40
    assert complete >= 8
    assert padded == (0 if share else 12)


ENDINGS = ("txt", "jsonl", "parquet")


@pytest.mark.parametrize("mixture", ["text alone", "retrieval beside"])
@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_killed_run_goes_on_where_it_was(tmp_path, ending, streaming, mixture):
    name = written(tmp_path, ending, texts_of(40))

    def opened():
        beside = [(make_source(RETRIEVAL), 0.4)] if mixture == "retrieval beside" else []
        mixed = [(make_source(name, streaming=streaming), 0.6), *beside]
        return Packed(TOKENIZER, mixed, 280, 5, hold_out=10)

    packed, states, items = opened(), [], []
    # more than two epochs, and the end of each
    while packed.epoch < 2 or len(items) % 5:
        states.append(json.dumps(packed.state_dict()))
        items.append(next(packed))
    assert len(items) < 80
    for at in range(0, len(items), 3):
        # what has read on goes back as well
        again = opened() if at % 2 else packed
        again.load_state_dict(json.loads(states[at]))
        assert json.dumps(again.state_dict()) == states[at]
        assert_same(firsts(again, 4)[: len(items) - at], items[at : at + 4])
    assert max(map(len, states)) < 3000


@pytest.mark.parametrize("streaming", [False, True])
def test_the_order_is_another_one_each_epoch_and_each_seed(tmp_path, streaming):
    name = written(tmp_path, "jsonl", texts_of(40))

    def numbers(salt, shuffle=True, **options):
        source = make_source(name, streaming=streaming, **options)
        source = replace(source, shuffle=shuffle)
        texts = sources.Texts(source, sources.Part(0), str(salt))
        drawn = [int(next(texts).split()[0]) for _ in range(120)]
        return [drawn[:40], drawn[40:80], drawn[80:]]

    one, other = numbers(0), numbers(1)
    assert all(sorted(epoch) == list(range(40)) for epoch in (*one, *other))
    assert one == numbers(0)
    assert len({tuple(epoch) for epoch in (*one, *other)}) == 6
    assert numbers(0, seed=1) != one
    assert numbers(0, shuffle=False) == [list(range(40))] * 3


def mixed():
    return [(in_memory(texts_of(40)), 0.6), (make_source(RETRIEVAL), 0.4)]


@pytest.mark.parametrize("world", [2, 4])
def test_the_order_does_not_depend_on_the_world(world):
    alone = firsts(Packed(TOKENIZER, mixed(), 280, 0), 12)
    ranks = [Packed(TOKENIZER, mixed(), 280, 0, rank=r, world=world) for r in range(world)]
    for round_ in range(12 // world):
        assert_same(list(map(next, ranks)), alone[round_ * world : (round_ + 1) * world])
        states = [json.dumps(rank.state_dict()) for rank in ranks]
        assert len(set(states)) == 1
    # and goes on in another
    packed = Packed(TOKENIZER, mixed(), 280, 0)
    firsts(ranks[0], 4)
    packed.load_state_dict(ranks[0].state_dict())
    expected = firsts(Packed(TOKENIZER, mixed(), 280, 0), 12 + 4 * world + 2)[-2:]
    assert_same(firsts(packed, 2), expected)
    assert packed.state_dict() != Packed(TOKENIZER, mixed(), 280, 0).state_dict()


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 1), (2, 1)])
def test_reading_ahead_gives_the_same_and_knows_its_place(world, workers):
    def opened():
        return Packed(TOKENIZER, mixed(), 280, 0, rank=world - 1, world=world)

    expected, ahead = firsts(opened(), 8), prefetched(opened(), workers=workers)
    drawn = torch.get_rng_state()
    items, states = zip(*firsts(ahead, 4), strict=True)
    assert_same(items, expected[:4])
    assert torch.equal(torch.get_rng_state(), drawn)
    # without a worker it goes on where one was
    packed = opened()
    packed.load_state_dict(json.loads(json.dumps(states[-1])))
    assert packed.state_dict() == states[-1]
    items, _ = zip(*firsts(prefetched(packed, workers=1 - workers), 4), strict=True)
    assert_same(items, expected[4:])


@pytest.mark.parametrize("methods", [["fork", "spawn"], ["spawn"]])
def test_what_goes_wrong_ahead_is_raised_where_it_is_read(methods, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "get_all_start_methods", lambda: methods)
    with pytest.raises(UsageError, match="must hold text; document 0 has 9"):
        next(prefetched(Packed(TOKENIZER, [(in_memory([9]), 1)], 90, 0, hold_out=0)))


def numbers_in(items):
    """The numbers of documents, four digits, that these sequences hold one behind the other."""
    ids = torch.cat([item["input_ids"] for item in items])
    match = re.findall(r"(?<!\d )(\d \d \d \d)(?! \d)", TOKENIZER.decode(ids))
    return {number.replace(" ", "") for number in match}


@pytest.mark.parametrize("streaming", [False, True])
def test_training_never_sees_what_is_held_out(tmp_path, streaming):
    numbered = [text(1000 + number) for number in range(60)]
    source = make_source(written(tmp_path, "jsonl", numbered), streaming=streaming)
    for seed in (0, 1):
        kept = held_out(TOKENIZER, [(source, 1)], LENGTH, 99, seed, hold_out=10)
        packed = Packed(TOKENIZER, [(source, 1)], LENGTH, seed, hold_out=10)
        trained = []
        while packed.epoch < 2:
            trained.append(next(packed))
        apart = {str(1000 + number) for number in range(0, 60, 10)}
        assert numbers_in(kept) == apart
        # of those documents once, and at most a sequence of them twice
        assert len(kept) < 8
        assert numbers_in(trained) == {str(1000 + number) for number in range(60)} - apart
        assert_same(held_out(TOKENIZER, [(source, 1)], LENGTH, 99, seed, hold_out=10), kept)
        assert_same(held_out(TOKENIZER, [(source, 1)], LENGTH, 2, seed, hold_out=10), kept[:2])


def test_held_out_retrieval_is_of_held_out_text():
    numbered = [" ".join(["rained" if number % 10 else "nobody"] * 300) for number in range(40)]
    mixed = [(in_memory(numbered), 0), (make_source("retrieval:passkey:200"), 1)]
    kept = held_out(TOKENIZER, mixed, 200, 4, hold_out=10)
    trained = firsts(Packed(TOKENIZER, mixed, 200, 0, hold_out=10), 4)
    read = [TOKENIZER.decode(item["input_ids"]) for item in kept]
    assert all("nobody" in text and "rained" not in text for text in read)
    read = [TOKENIZER.decode(item["input_ids"]) for item in trained]
    assert all("rained" in text and "nobody" not in text for text in read)


@pytest.mark.parametrize("added", ["<more>", "."], ids=["in a text", "behind a text"])
def test_a_token_that_the_model_does_not_know_is_refused(added):
    tokenizer = letters()
    tokenizer.add_tokens("<more>")
    if added == ".":
        tokenizer.eos_token = "<more>"
    more = len(tokenizer) - 1
    known = [(in_memory(["a b c <more>" if added == "<more>" else "a b c"] * 3), 1)]
    packed = Packed(tokenizer, known, 8, 0, hold_out=0, vocabulary=more)
    with pytest.raises(UsageError, match=rf"data has token {more} \('<more>'\), and the model"):
        next(packed)
    next(Packed(tokenizer, known, 8, 0, hold_out=0, vocabulary=more + 1))
    # padding is a token that it knows
    tokenizer = letters()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    padded = [(make_source("retrieval:keys:70"), 1)]
    packed = Packed(tokenizer, padded, 80, 0, vocabulary=len(tokenizer) - 1)
    assert next(packed)["input_ids"][70:].tolist() == [tokenizer.eos_token_id] * 10


def file_of(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_names_of_the_hub_are_loaded_by_datasets(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_dict({"story": texts_of(9), "title": ["a"] * 9})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    commit = SimpleNamespace(hash="a commit")
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *named: commit)
    source = make_source("someone/books:small", text_field="story", split="validation")
    named = ("someone/books", "small")
    assert asked == [(named, {"split": "validation", "streaming": False})]
    assert source.sha256 == "a commit" and source.dataset.column_names == ["story"]


def read_from(name, streaming=False):
    """All texts of a source, in the order of the data."""
    source = make_source(str(name), streaming=streaming)
    return [row["text"] for row in source.dataset]


def rows_of(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize(("named", "matched"), [("d[1]/a", "d1/a"), ("a?", "ab"), ("**/a", "c/a")])
def test_a_path_is_no_pattern(tmp_path, ending, named, matched, streaming):
    for name in (named, matched):
        file = tmp_path / f"{name}.{ending}"
        file.parent.mkdir(parents=True, exist_ok=True)
        if ending == "parquet":
            datasets.Dataset.from_dict({"text": [name]}).to_parquet(str(file))
        else:
            file.write_text(name if ending == "txt" else rows_of(name))
    assert read_from(tmp_path / f"{named}.{ending}", streaming) == [named]
    if "/" in named and "*" not in named:
        assert read_from((tmp_path / named).parent, streaming) == [named]


def test_content_is_told_from_any_other(tmp_path):
    """Whatever the names, the place and the time stamps of files."""
    content, read = [], []
    for place, texts in (("one", "abcd"), ("two", "abcd"), ("three", "bacd")):
        for number, text in enumerate(texts):
            os.utime(file_of(tmp_path / place, f"{place}-{number}.txt", text), (1.7e9, 1.7e9))
        content.append(make_source(str(tmp_path / place)).sha256)
        read.append(read_from(tmp_path / place))
    assert content[0] == content[1] != content[2]
    assert read == [[*"abcd"], [*"abcd"], [*"bacd"]]


def test_of_a_folder_hidden_files_are_not_read_and_folders_are_read_through(tmp_path):
    folder = tmp_path / ".shown"
    for hidden in (".checkpoints/a.txt", ".a.txt", "b/.old/c/a.txt"):
        file_of(folder, hidden, "old")
    # a byte order mark is no text
    file_of(folder, "b.txt/a.txt", codecs.BOM_UTF8 + b"new")
    assert read_from(folder) == ["new"]


LINE = json.dumps({"content": "a b c", "title": "x"}) + "\n"
GOOD = {"txt": "a b", "jsonl": rows_of("a b")}


@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({"a.txt": ""}, "'.*a.txt' has no documents", id="empty text"),
        pytest.param({"a.jsonl": ""}, "'.*a.jsonl' has no documents", id="empty jsonl"),
        pytest.param({"a.jsonl": LINE}, "no field 'text'; known are content", id="no field"),
        pytest.param({"a.jsonl": '{"txt": "a"}\n'}, "did you mean txt?", id="near field"),
        pytest.param({"a.txt": b"\xff\xfe\x00bin"}, "cannot be read .*codec", id="binary"),
        pytest.param({"a.jsonl": "{not json"}, "cannot be read", id="no json"),
        pytest.param({"a.parquet": "PAR0"}, "cannot be read", id="no parquet"),
        pytest.param({"a.csv": "text"}, "must be a file of .txt, .jsonl", id="another kind"),
        pytest.param({"a.jsonl": '{"text": 7}\n'}, "'text' .* document 0 has 7", id="numbers"),
        pytest.param({"a.jsonl": '{"text": null}\n'}, "documents of fewer than two", id="null"),
        pytest.param({"a.jsonl": rows_of("It")}, "documents of fewer than two tokens", id="short"),
        pytest.param({"a.txt": gzip.compress(b"a b")}, "a.txt is compressed", id="compressed"),
        pytest.param({"a.txt": None}, "is no file or folder that is there", id="gone"),
        pytest.param({".": ""}, "it holds no files", id="empty folder"),
        pytest.param({".": "", "b.jsonl": LINE, "a.txt": "a"}, "holds .jsonl and .txt", id="kinds"),
        pytest.param({".": "", "a.txt": "a", "b.txt": None}, "b.txt", id="a link to nothing"),
        pytest.param({".": "", "2.txt": b"\xe9"}, "\\(2.txt: 'utf-8' codec", id="which text"),
        pytest.param({".": "", "2.jsonl": "{not"}, "\\(2.jsonl: JSON parse error", id="which json"),
        pytest.param({".": "", "2.jsonl": LINE}, "\\(2.jsonl: there are 2 new", id="which fields"),
    ],
)
def test_data_that_cannot_be_read_is_refused(tmp_path, files, message, streaming):
    """Files of these contents, None being a link to nothing; with "." all of the folder."""
    for name, content in files.items():
        if content is None:
            (tmp_path / name).symlink_to(tmp_path / "gone")
        elif name != ".":
            file_of(tmp_path, name, content)
    name = str(tmp_path / next(iter(files)))
    if "2" in "".join(files):
        ending = [*files][-1].partition(".")[2]
        for number in (1, 3):
            file_of(tmp_path, f"{number}.{ending}", GOOD[ending])
    with pytest.raises(UsageError, match=message) as refusal:
        source = make_source(name, streaming=streaming)
        firsts(Packed(TOKENIZER, [(source, 1)], 20, 0, hold_out=0), 3)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["none.jsonl", "./none", "/nowhere/a", "text", "folder:main"])
def test_what_is_not_there_is_not_asked_of_the_hub(tmp_path, monkeypatch, name):
    """By some names datasets reads the working directory, or a folder in it."""
    file_of(tmp_path, "folder/a.txt", "a b c")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"'{name}' is no file or folder that is there"):
        make_source(name)


@pytest.mark.parametrize(
    ("learnt", "watched", "refused"),
    [
        pytest.param("a.txt", "a.txt", True, id="one file"),
        pytest.param("a.txt", "copy.txt", True, id="a copy"),
        pytest.param("a.txt", "texts", True, id="in a folder"),
        pytest.param("a.txt", "b.txt", False, id="as long"),
        pytest.param("retrieval:passkey:256", "retrieval:passkey:256", False, id="synthetic"),
        pytest.param("a.txt=0", "a.txt", False, id="text around keys"),
    ],
)
def test_a_run_is_not_watched_on_what_it_learns(tmp_path, monkeypatch, learnt, watched, refused):
    for name in ("a.txt", "copy.txt", "texts/inside.txt"):
        file_of(tmp_path, name, "It rained.")
    file_of(tmp_path, "b.txt", "It snowed.")
    monkeypatch.chdir(tmp_path)
    name, _, share = learnt.partition("=")
    given = [(make_source(name), float(share or 1))], [(make_source(watched), 1.0)]
    with pytest.raises(UsageError, match="data 'a.txt'") if refused else nullcontext():
        sources.refuse_learnt(*given)


@pytest.mark.parametrize("streaming", [False, True])
def test_short_documents_are_skipped(streaming):
    dataset = datasets.Dataset.from_dict({"text": ["a b c", "", "d"]})
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    source = sources.TextSource("memory", dataset, "text", shuffle=False)
    packed = Packed(letters(), [(source, 1)], 8, 0, hold_out=0)
    assert spelled(letters(), next(packed)["input_ids"]) == "abc.abc."


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("streaming", [False, True], ids=["at once", "streaming"])
def test_local_files_ask_no_host(tmp_path, monkeypatch, kind, streaming):
    asked = []

    def look_up(host, *_, **__):
        asked.append(host)
        raise socket.gaierror

    # as they are where a user has said nothing
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    source = make_source(written(tmp_path, kind, texts_of(9)), streaming=streaming)
    firsts(Packed(TOKENIZER, [(source, 1)], LENGTH, 0), 3)
    assert asked == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        pytest.param("", {"share": 0}, "data must have a source", id="no share"),
        pytest.param("", {"hold_out": 1}, "no documents where one in 1 is held out", id="all out"),
        pytest.param("", {"hold_out": 0}, "has no held-out documents where none", id="none out"),
        pytest.param("retrieval:passkey:99", {}, "and a sequence has 48", id="too long"),
        pytest.param("retrieval:passkey:40", {}, "length 40 has no room", id="no room"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, options, message):
    source = make_source(name) if name else in_memory(texts_of(9))
    share, hold_out = options.get("share", 1), options.get("hold_out", 100)
    with pytest.raises(UsageError, match=message):
        Packed(
            TOKENIZER, [(source, share)], LENGTH, 0, hold_out=hold_out, only_held_out=not hold_out
        )


def test_a_document_without_room_is_told_of_its_source():
    """The first one had room, and what a later one draws is longer."""
    packed = Packed(TOKENIZER, [(make_source("retrieval:keys:25"), 1)], 25, 0)
    with pytest.raises(UsageError, match="source 'retrieval:keys:25': length 25 has no room for"):
        firsts(packed, 50)


def test_every_token_is_learnt_once():
    """But for the first of each document."""
    source = in_memory(texts_of(30), shuffle=False)
    packed = Packed(TOKENIZER, [(source, 1)], LENGTH, 0, hold_out=0)
    learnt = [label for item in firsts(packed, 20) for label in item["labels"].tolist()]
    learnt = [label for label in learnt if label != data.IGNORED]
    all_of_them = [token for each in texts_of(30) for token in tokens_of(each)[1:]]
    assert learnt[: len(all_of_them)] == all_of_them[: len(learnt)]
    assert len(learnt) > 20 * LENGTH * 0.9


def test_a_source_of_its_own_is_held_out_as_a_whole():
    kept = held_out(TOKENIZER, [(in_memory([text(1000), text(1001)]), 1)], LENGTH, 9, hold_out=1)
    assert numbers_in(kept) == {"1000", "1001"}
