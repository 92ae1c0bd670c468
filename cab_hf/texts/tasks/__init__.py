"""Questions about long texts, as long-context benchmarks ask them, of an exact length in tokens.

Each is a `Task`, by its name in `TASKS`; the modules have the categories of RULER (Hsieh et al.
2024, arXiv 2404.06654). ``TASKS["uuid"].make(tokenizer, sentences, length, index, seed)`` is an
`Example`, whose answers stand behind its prompt: to be scored by teacher forcing, generated, or
learnt.
"""

from __future__ import annotations

from cab_hf.texts.tasks.aggregation import common_words, frequent_words
from cab_hf.texts.tasks.base import Example, Task
from cab_hf.texts.tasks.retrieval import alike_keys, copying, many_keys, several_values, uuids
from cab_hf.texts.tasks.tracing import tracking, two_facts

__all__ = ["TASKS", "Example", "Task"]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("many_keys", "many keys", many_keys),
        Task("several_values", "several values", several_values),
        Task("alike_keys", "alike keys", alike_keys),
        Task("uuid", "UUIDs", uuids),
        Task("copying", "copying", copying),
        Task("tracking", "variable tracking", tracking),
        Task("two_facts", "two facts", two_facts),
        Task("common_words", "common words", common_words),
        Task("frequent_words", "frequent words", frequent_words),
    )
}
