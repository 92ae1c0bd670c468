"""Docstrings, comments and errors use plain English, and calls unpack few tuples."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKED_FOLDERS = ("cab_hf", "patches", "finetune", "eval", "examples", "tests")
# first words of a docstring that start a clause without its verb
NON_VERB_OPENINGS = {
    *("What", "Whether", "Of", "How", "Those", "Where", "Which", "That", "By", "Up"),
    *("From", "With", "For", "To", "As", "On", "In"),
}
# colloquial words that texts must not use. In the same order, texts use instead: after, next to,
# again, receives, no process or no user, n
COLLOQUIAL_WORDS = re.compile(r"\b(behind|beside|anew|told|nobody|so many)\b")
# largest number of calls f(*name) per 1,000 lines of the library, including forwarded *args
MAX_ARGUMENT_UNPACKINGS = 2
LIBRARY_FOLDERS = ("cab_hf", "patches", "finetune")


def find_python_files(folders):
    """Return the paths of tracked Python files, or of all files outside of a git checkout."""
    git_process = subprocess.run(
        ["git", "ls-files", "--", *(f"{folder}/**.py" for folder in folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    paths = [ROOT / line for line in git_process.stdout.splitlines()]
    paths = paths or [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in paths if path.exists() and path != Path(__file__))


def find_texts(source):
    """Yield line, kind and text of docstrings, comments and messages of raised errors."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                text_kind = "module" if isinstance(node, ast.Module) else "docstring"
                yield node.body[0].lineno, text_kind, text
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for string_node in ast.walk(node.exc):
                if isinstance(string_node, ast.Constant) and isinstance(string_node.value, str):
                    yield string_node.lineno, "message", string_node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string


def find_problems(source):
    """Return line and description of each text that breaks the rules of this module."""
    problems = []
    for line_number, text_kind, text in find_texts(source):
        first_word = re.match(r"\W*(\w+)", text)
        if text_kind == "docstring" and first_word and first_word[1] in NON_VERB_OPENINGS:
            problems.append((line_number, f"docstring starts with {first_word[1]!r}"))
        problems += [
            (line_number, f"{text_kind} contains {colloquial_word!r}")
            for colloquial_word in COLLOQUIAL_WORDS.findall(text)
        ]
    return problems


def count_unpacked_calls(source):
    """Count calls that unpack a variable into positional arguments."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sum(
        isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name)
        for call in calls
        for argument in call.args
    )


@pytest.mark.parametrize("folder", CHECKED_FOLDERS)
def test_texts_use_plain_english(folder):
    problems = [
        f"{path.relative_to(ROOT)}:{line_number}: {description}"
        for path in find_python_files([folder])
        for line_number, description in find_problems(path.read_text())
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "num_problems"),
    [
        ('def f():\n    """Return a tensor."""', 0),
        ('def f():\n    """What a tensor is."""', 1),
        ('"""What a module is for."""', 0),
        ("# the block behind this one", 1),
        ("raise ValueError(f'{x} was told')", 1),
        ("name = 'beside'", 0),
    ],
)
def test_find_problems_counts_problems_of_sample_sources(source, num_problems):
    assert len(find_problems(source)) == num_problems


def test_library_unpacks_few_variables_into_calls():
    source_texts = [path.read_text() for path in find_python_files(LIBRARY_FOLDERS)]
    num_lines = sum(source.count("\n") for source in source_texts)
    num_calls = sum(map(count_unpacked_calls, source_texts))
    assert num_calls <= MAX_ARGUMENT_UNPACKINGS * num_lines / 1000, (
        f"{num_calls} calls in {num_lines} lines"
    )
