"""Questions about long texts, as long-context benchmarks ask them, of an exact length in tokens.

Each is a `Task`, by its name in `TASKS`; the modules have the categories of RULER (Hsieh et al.
2024, arXiv 2404.06654). ``TASKS["uuid"].make(tokenizer, sentences, length, index, seed)`` is an
`Example`, whose answers stand behind its prompt: to be scored by teacher forcing, generated, or
learnt.
"""

from __future__ import annotations

from cab_hf.texts.tasks.aggregation import CommonWords, FrequentWords
from cab_hf.texts.tasks.base import Example, Task
from cab_hf.texts.tasks.retrieval import AlikeKeys, Copying, ManyKeys, SeveralValues, Uuids
from cab_hf.texts.tasks.tracing import Tracking, TwoFacts

__all__ = ["TASKS", "Example", "Task"]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(ManyKeys(), SeveralValues(), AlikeKeys(), Uuids(), Copying()),
        *(Tracking(), TwoFacts()),
        *(CommonWords(), FrequentWords()),
    )
}
