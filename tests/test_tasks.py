"""Long-context tasks: prompts determine the answers, and have the requested length."""

import re
from collections import Counter
from pathlib import Path

import pytest
from words import CHAT_TEMPLATE, PROSE_TEXT, make_merging_tokenizer, make_tokenizer

from cab_hf.data.needles import NOISE_SENTENCES, split_sentences
from cab_hf.data.tasks import END_SENTENCE, TASKS

EXAMPLE_TOKENS = 1500
TOKENIZERS = {
    "words": make_tokenizer(),
    "chat": make_tokenizer(CHAT_TEMPLATE),
    "merging": make_merging_tokenizer(),
}
# tasks that ask for frequent words, and hide no needles
COUNTING_TASKS = ("common_words", "frequent_words")
NEEDLE_TASKS = [task for task in TASKS if task not in COUNTING_TASKS]
parametrize_task = pytest.mark.parametrize("task", TASKS)


def make_example(
    task,
    tokenizer_name="merging",
    length=EXAMPLE_TOKENS,
    index=0,
    seed=0,
    sentences=NOISE_SENTENCES,
):
    """Return an example of the task ``task``, with its prompt, needles and answers."""
    return TASKS[task].make(TOKENIZERS[tokenizer_name], sentences, length, index=index, seed=seed)


def decode_text(token_ids):
    """Decode token ids of the tokenizer "merging"."""
    return TOKENIZERS["merging"].decode(token_ids, clean_up_tokenization_spaces=False)


def list_words(prompt_text):
    """Return the list of words that follows the instruction of a prompt."""
    return prompt_text.split("\n\n", 1)[1].split()


def find_common_words(prompt_text, question):
    """Find the answers of a prompt: the ten words that occur ten times as often as the others."""
    count_by_word = Counter(list_words(prompt_text))
    high_count, low_count = (
        count_by_word.most_common(11)[0][1],
        count_by_word.most_common(11)[10][1],
    )
    assert high_count == 10 * low_count
    return [word for word, count in count_by_word.items() if count == high_count]


def find_frequent_words(prompt_text, question):
    """Find the answers of a prompt: the three most frequent words, not counting "...."."""
    most_common_word, *ranked_words = Counter(list_words(prompt_text)).most_common(5)
    assert most_common_word[0] == "...."
    counts = [count for _, count in (most_common_word, *ranked_words)]
    assert counts == sorted(set(counts), reverse=True)
    return [word for word, _ in ranked_words[:3]]


def find_key(prompt_text, question):
    """Find the answer of a prompt: the pass key of the name or locker in the question."""
    (owner,) = re.findall(r"pass key( for [\w ]+)\?", question)
    return re.findall(rf"The pass key{owner} is (\d+)\.", prompt_text)


def find_values(prompt_text, question):
    """Find the answers of a prompt: all pass keys of the name in the question."""
    (owner,) = re.findall(r"pass keys for (\w+),", question)
    return re.findall(rf"One of the pass keys for {owner} is (\d+)\.", prompt_text)


def find_uuid_value(prompt_text, question):
    """Find the answer of a prompt: the JSON value of the key in the question."""
    (uuid,) = re.findall(r"the key ([\w-]+)\?", question)
    return re.findall(f'"{uuid}": "([^"]+)",', prompt_text)


def find_copied_text(prompt_text, question):
    """Find the answer of a prompt: the text that follows the five words in the question."""
    (first_words,) = re.findall(r'"(.+)"', question)
    assert len(first_words.split()) == 5
    return re.findall(rf"{first_words} ((?:[^.]+\.){{2}}[^.]+)\.", prompt_text)


def find_variables(prompt_text, question):
    """Find the answers of a prompt: the variables that have the value in the question.

    Variables have the value directly, or by assignment of another such variable.
    """
    # keys of this dict: the value, and then the variables found so far
    found_variables = dict.fromkeys(re.findall(r"value (\d+),", question))
    for variable, assigned_variable in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", prompt_text):
        if assigned_variable in found_variables:
            found_variables[variable] = None
    return list(found_variables)[1:]


def find_deputy_key(prompt_text, question):
    """Find the answer of a prompt: the pass key of the deputy of the name in the question."""
    (chief_name,) = re.findall(r"the deputy of (\w+)\?", question)
    (deputy_name,) = re.findall(rf"The deputy of {chief_name} is (\w+)\.", prompt_text)
    return re.findall(rf"The pass key for {deputy_name} is (\d+)\.", prompt_text)


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
    "sentences", [NOISE_SENTENCES, split_sentences(PROSE_TEXT)], ids=["noise", "text"]
)
def test_prompt_contains_the_answers(task, sentences):
    for index in range(4):
        example = make_example(task, index=index, sentences=sentences)
        prompt_text, question = decode_text(example.tokens[: example.prompt]).split(
            f" {END_SENTENCE}\n\n"
        )
        assert ANSWER_FINDERS[task](prompt_text, question) == list(example.replies)


@parametrize_task
def test_spans_locate_answers(task):
    example = make_example(task)
    answer_texts = [
        decode_text(example.tokens[start:end]).strip() for start, end in example.answers
    ]
    assert answer_texts == list(example.replies)
    assert example.answers[0][0] == example.prompt
    # the tokens after the prompt are the answers, separated by commas
    text_after_prompt = decode_text(example.tokens[example.prompt :])
    assert text_after_prompt.strip() == f"{', '.join(example.replies)}."


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_answer_occurs_only_in_needles(task):
    for index in range(4):
        example = make_example(task, index=index)
        needle_ranges = [range(start, end) for start, end in example.needles]
        needle_text = decode_text(
            [
                example.tokens[position]
                for needle_range in needle_ranges
                for position in needle_range
            ]
        )
        assert all(reply in needle_text for reply in example.replies)
        other_tokens, previous_needle_end = [], 0
        for start, end in sorted(example.needles):
            other_tokens += example.tokens[previous_needle_end:start]
            previous_needle_end = end
        other_tokens += example.tokens[previous_needle_end : example.prompt]
        assert not any(reply in decode_text(other_tokens) for reply in example.replies)


@parametrize_task
@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_prompt_and_answers_have_the_length(task, tokenizer_name):
    for length in (EXAMPLE_TOKENS, EXAMPLE_TOKENS + 7, 4501):
        example = make_example(task, tokenizer_name, length)
        assert len(example.tokens) == length
        assert 0 < example.prompt == example.answers[0][0]
        answer_borders = [index for span in example.answers for index in span]
        assert answer_borders == sorted(set(answer_borders)) and answer_borders[-1] <= length
        assert len(example.answers) == len(example.replies)
        assert all(0 < start < end <= example.prompt for start, end in example.needles)


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_needle_depths_differ_between_examples(task):
    examples = [make_example(task, "words", index=index) for index in range(24)]
    assert len({example.needles for example in examples}) == 24
    if len(examples[0].needles) > 1:
        return
    relative_starts = sorted(example.needles[0][0] / EXAMPLE_TOKENS for example in examples)
    # relative positions of the needles are about evenly spaced
    gaps_between_starts = [
        gap_end - gap_start
        for gap_start, gap_end in zip([0, *relative_starts], [*relative_starts, 1], strict=True)
    ]
    assert min(gaps_between_starts[1:-1]) > 0 and max(gaps_between_starts) < 0.2


def test_two_facts_occur_in_both_orders():
    is_deputy_first = set()
    for index in range(12):
        (deputy_start, _), (key_start, _) = make_example("two_facts", index=index).needles
        assert abs(deputy_start - key_start) > 0.15 * EXAMPLE_TOKENS
        is_deputy_first.add(deputy_start < key_start)
    assert is_deputy_first == {True, False}


def test_similar_keys_differ_in_one_digit():
    example_text = decode_text(make_example("alike_keys").tokens)
    asked_locker = re.search(r"for locker (\d+)\?", example_text)[1]
    other_lockers = set(re.findall(r"The pass key for locker (\d+) is \d+\. ", example_text)) - {
        asked_locker
    }
    assert len(other_lockers) == 15
    for other_locker in other_lockers:
        assert (
            sum(
                digit != asked_digit
                for digit, asked_digit in zip(other_locker, asked_locker, strict=True)
            )
            == 1
        )


def test_common_word_counts_match_ruler():
    example = make_example("common_words", length=9000)
    prompt_text = decode_text(example.tokens[: example.prompt]).partition(f" {END_SENTENCE}")[0]
    num_words_by_count = Counter(Counter(list_words(prompt_text)).values())
    assert (
        set(num_words_by_count) <= {30, 3, 1}
        and num_words_by_count[30] == 10
        and num_words_by_count[3] > 100 > 5 > num_words_by_count[1]
    )


@parametrize_task
@pytest.mark.parametrize("changed_argument", ["index", "seed", "length"])
def test_example_depends_on_seed_and_index_only(task, changed_argument):
    example_arguments = {"length": EXAMPLE_TOKENS, "index": 0, "seed": 0}
    example = make_example(task, **example_arguments)
    assert make_example(task, **example_arguments, sentences=list(NOISE_SENTENCES)) == example
    other_example = make_example(
        task, **{**example_arguments, changed_argument: example_arguments[changed_argument] + 1}
    )
    assert not {*other_example.replies} & {*example.replies}


@parametrize_task
def test_prompt_starts_with_special_tokens_once(task):
    tokenizer = TOKENIZERS["merging"]
    tokens = make_example(task).tokens
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in tokens[1:]


@parametrize_task
def test_prompt_uses_chat_template(task):
    example = make_example(task, "chat")
    example_text = TOKENIZERS["chat"].decode(example.tokens)
    assert example_text.startswith("user : ") and example_text.count(" end assistant : ") == 1


@parametrize_task
@pytest.mark.parametrize("length", [40, 100])
def test_too_short_length_raises(task, length):
    with pytest.raises(
        ValueError, match=f"length must have room for the task {task}, got {length}"
    ):
        make_example(task, length=length)


def test_docs_list_every_task():
    page_text = (Path(__file__).parents[1] / "docs" / "appendix.md").read_text()
    first_cells = [
        line.split("|")[1].strip(" `") for line in page_text.splitlines() if line.startswith("| `")
    ]
    assert [cell for cell in first_cells if cell in TASKS] == list(TASKS)
