"""Long-context tasks: prompts determine the answers, and have the requested length."""

import re
from collections import Counter
from pathlib import Path

import pytest
from words import CHAT_TEMPLATE, TEXT, make_merging_tokenizer, make_tokenizer

from cab_hf.data.needles import NOISE_SENTENCES, split_sentences
from cab_hf.data.tasks import END_SENTENCE, TASKS

LENGTH = 1500
TOKENIZERS = {
    "words": make_tokenizer(),
    "chat": make_tokenizer(CHAT_TEMPLATE),
    "merging": make_merging_tokenizer(),
}
# tasks that ask for frequent words, and hide no needles
COUNTING_TASKS = ("common_words", "frequent_words")
NEEDLE_TASKS = [name for name in TASKS if name not in COUNTING_TASKS]
parametrize_task = pytest.mark.parametrize("name", TASKS)


def make_example(
    name, tokenizer="merging", length=LENGTH, index=0, seed=0, sentences=NOISE_SENTENCES
):
    """Return an example of the task ``name``, with its prompt, needles and answers."""
    return TASKS[name].make(TOKENIZERS[tokenizer], sentences, length, index=index, seed=seed)


def decode_text(tokens):
    """Decode token ids of the tokenizer "merging"."""
    return TOKENIZERS["merging"].decode(tokens, clean_up_tokenization_spaces=False)


def list_words(text):
    """Return the list of words that follows the instruction of a prompt."""
    return text.split("\n\n", 1)[1].split()


def find_common_words(text, question):
    """Find the answers of a prompt: the ten words that occur ten times as often as the others."""
    counts = Counter(list_words(text))
    high_count, low_count = counts.most_common(11)[0][1], counts.most_common(11)[10][1]
    assert high_count == 10 * low_count
    return [word for word, count in counts.items() if count == high_count]


def find_frequent_words(text, question):
    """Find the answers of a prompt: the three most frequent words, not counting "...."."""
    most_common, *ranked = Counter(list_words(text)).most_common(5)
    assert most_common[0] == "...."
    counts = [count for _, count in (most_common, *ranked)]
    assert counts == sorted(set(counts), reverse=True)
    return [word for word, _ in ranked[:3]]


def find_key(text, question):
    """Find the answer of a prompt: the pass key of the name or locker in the question."""
    (owner,) = re.findall(r"pass key( for [\w ]+)\?", question)
    return re.findall(rf"The pass key{owner} is (\d+)\.", text)


def find_values(text, question):
    """Find the answers of a prompt: all pass keys of the name in the question."""
    (name,) = re.findall(r"pass keys for (\w+),", question)
    return re.findall(rf"One of the pass keys for {name} is (\d+)\.", text)


def find_uuid_value(text, question):
    """Find the answer of a prompt: the JSON value of the key in the question."""
    (key,) = re.findall(r"the key ([\w-]+)\?", question)
    return re.findall(f'"{key}": "([^"]+)",', text)


def find_copied_text(text, question):
    """Find the answer of a prompt: the text that follows the five words in the question."""
    (first_words,) = re.findall(r'"(.+)"', question)
    assert len(first_words.split()) == 5
    return re.findall(rf"{first_words} ((?:[^.]+\.){{2}}[^.]+)\.", text)


def find_variables(text, question):
    """Find the answers of a prompt: the variables that have the value in the question.

    Variables have the value directly, or by assignment of another such variable.
    """
    # keys of this dict: the value, and then the variables found so far
    names = dict.fromkeys(re.findall(r"value (\d+),", question))
    for name, assigned_name in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        if assigned_name in names:
            names[name] = None
    return list(names)[1:]


def find_deputy_key(text, question):
    """Find the answer of a prompt: the pass key of the deputy of the name in the question."""
    (chief,) = re.findall(r"the deputy of (\w+)\?", question)
    (deputy,) = re.findall(rf"The deputy of {chief} is (\w+)\.", text)
    return re.findall(rf"The pass key for {deputy} is (\d+)\.", text)


ANSWER_FINDERS = {
    **{"many_keys": find_key, "alike_keys": find_key, "several_values": find_values},
    **{
        "uuid": find_uuid_value,
        "copying": find_copied_text,
        "tracking": find_variables,
        "two_facts": find_deputy_key,
    },
    **{"common_words": find_common_words, "frequent_words": find_frequent_words},
}


@parametrize_task
@pytest.mark.parametrize(
    "sentences", [NOISE_SENTENCES, split_sentences(TEXT)], ids=["noise", "text"]
)
def test_prompt_contains_the_answers(name, sentences):
    for index in range(4):
        example = make_example(name, index=index, sentences=sentences)
        text, question = decode_text(example.tokens[: example.prompt]).split(f" {END_SENTENCE}\n\n")
        assert ANSWER_FINDERS[name](text, question) == list(example.replies)


@parametrize_task
def test_spans_locate_answers(name):
    example = make_example(name)
    answers = [decode_text(example.tokens[start:end]).strip() for start, end in example.answers]
    assert answers == list(example.replies)
    assert example.answers[0][0] == example.prompt
    # the tokens after the prompt are the answers, separated by commas
    after_prompt = decode_text(example.tokens[example.prompt :])
    assert after_prompt.strip() == f"{', '.join(example.replies)}."


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_answer_occurs_only_in_needles(name):
    for index in range(4):
        example = make_example(name, index=index)
        spans = [range(start, end) for start, end in example.needles]
        needle_text = decode_text([example.tokens[index] for span in spans for index in span])
        assert all(reply in needle_text for reply in example.replies)
        other_tokens, previous_end = [], 0
        for start, end in sorted(example.needles):
            other_tokens += example.tokens[previous_end:start]
            previous_end = end
        other_tokens += example.tokens[previous_end : example.prompt]
        assert not any(reply in decode_text(other_tokens) for reply in example.replies)


@parametrize_task
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_prompt_and_answers_have_the_length(name, tokenizer):
    for length in (LENGTH, LENGTH + 7, 4501):
        example = make_example(name, tokenizer, length)
        assert len(example.tokens) == length
        assert 0 < example.prompt == example.answers[0][0]
        borders = [index for span in example.answers for index in span]
        assert borders == sorted(set(borders)) and borders[-1] <= length
        assert len(example.answers) == len(example.replies)
        assert all(0 < start < end <= example.prompt for start, end in example.needles)


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_needle_depths_differ_between_examples(name):
    examples = [make_example(name, "words", index=index) for index in range(24)]
    assert len({example.needles for example in examples}) == 24
    if len(examples[0].needles) > 1:
        return
    starts = sorted(example.needles[0][0] / LENGTH for example in examples)
    # relative positions of the needles are about evenly spaced
    gaps = [b - a for a, b in zip([0, *starts], [*starts, 1], strict=True)]
    assert min(gaps[1:-1]) > 0 and max(gaps) < 0.2


def test_two_facts_occur_in_both_orders():
    orders = set()
    for index in range(12):
        (deputy_start, _), (key_start, _) = make_example("two_facts", index=index).needles
        assert abs(deputy_start - key_start) > 0.15 * LENGTH
        orders.add(deputy_start < key_start)
    assert orders == {True, False}


def test_similar_keys_differ_in_one_digit():
    text = decode_text(make_example("alike_keys").tokens)
    asked_locker = re.search(r"for locker (\d+)\?", text)[1]
    other_lockers = set(re.findall(r"The pass key for locker (\d+) is \d+\. ", text)) - {
        asked_locker
    }
    assert len(other_lockers) == 15
    for locker in other_lockers:
        assert sum(a != b for a, b in zip(locker, asked_locker, strict=True)) == 1


def test_common_word_counts_match_ruler():
    example = make_example("common_words", length=9000)
    text = decode_text(example.tokens[: example.prompt]).partition(f" {END_SENTENCE}")[0]
    counts = Counter(Counter(list_words(text)).values())
    assert set(counts) <= {30, 3, 1} and counts[30] == 10 and counts[3] > 100 > 5 > counts[1]


@parametrize_task
@pytest.mark.parametrize("changed_argument", ["index", "seed", "length"])
def test_example_depends_on_seed_and_index_only(name, changed_argument):
    arguments = {"length": LENGTH, "index": 0, "seed": 0}
    example = make_example(name, **arguments)
    assert make_example(name, **arguments, sentences=list(NOISE_SENTENCES)) == example
    other_example = make_example(
        name, **{**arguments, changed_argument: arguments[changed_argument] + 1}
    )
    assert not {*other_example.replies} & {*example.replies}


@parametrize_task
def test_prompt_starts_with_special_tokens_once(name):
    tokenizer = TOKENIZERS["merging"]
    tokens = make_example(name).tokens
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in tokens[1:]


@parametrize_task
def test_prompt_uses_chat_template(name):
    example = make_example(name, "chat")
    text = TOKENIZERS["chat"].decode(example.tokens)
    assert text.startswith("user : ") and text.count(" end assistant : ") == 1


@parametrize_task
@pytest.mark.parametrize("length", [40, 100])
def test_too_short_length_raises(name, length):
    with pytest.raises(
        ValueError, match=f"length must have room for the task {name}, got {length}"
    ):
        make_example(name, length=length)


def test_docs_list_every_task():
    page = (Path(__file__).parents[1] / "docs" / "appendix.md").read_text()
    rows = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row in TASKS] == list(TASKS)
