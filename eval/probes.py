"""The probes of `fidelity`: what is asked of a method, by name."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from cab_hf.texts.tasks import TASKS

PASS, QUESTION_FIRST, MULTI_KEY = "pass", "question_first", "multi_key"
RECALL, PERPLEXITY = "recall", "perplexity"
# of what begins a query block: nothing that chooses with the query before it has seen it
RECALL_BORDER, PERPLEXITY_BORDER = "recall_border", "perplexity_border"
RECALLS, PERPLEXITIES = (RECALL, RECALL_BORDER), (PERPLEXITY, PERPLEXITY_BORDER)
# of what follows a prompt: the prompt is read by the method, what follows through the KV cache
CONTINUATION, ASKED = "continuation", "asked"
# the same in every turn of a chat, over one KV cache; and how many turns there are
TURNS, TURN_COUNT = "turns", 5
# the same, where the method also decodes what follows; and what it writes itself
DECODE, DECODE_ASKED, GREEDY = "decode", "decode_asked", "greedy"
DECODES = (DECODE, DECODE_ASKED, GREEDY)
WITH_KEYS_ASKED = (ASKED, DECODE_ASKED)
PROMPTS = (CONTINUATION, ASKED, TURNS, *DECODES, PASS, QUESTION_FIRST, MULTI_KEY)
PROBES = (*PROMPTS, *RECALLS, *PERPLEXITIES, *TASKS)
# the probes of all tasks, and the mean over them
ALL_TASKS = "tasks"
# unless others are asked for
USUAL = (CONTINUATION, ASKED, PASS, QUESTION_FIRST, RECALL, PERPLEXITY)
# tokens of a text that are read behind a prompt, and the most of it that they may be
CONTINUED, CONTINUED_SHARE = 256, 8
# tokens of all the texts that are decoded side by side, as a step costs their launches once
TOKENS_AT_ONCE = 2**17
PROMPTED = (PASS, QUESTION_FIRST, MULTI_KEY)  # probes that are prompts; the others are documents
# keys in the prompts of a probe, each of another name, where they are several
NAMED_KEYS = {MULTI_KEY: 4}
BORDER = 128  # tokens that whole query blocks make up, unless one is larger
NOISE = "noise"  # the text that is no file
# what every method is asked alike
question_of = itemgetter("text", "length", "probe", "depth", "index")


def border_of(query_blocks: Iterable[int]) -> int:
    """Tokens from one border to the next: at each, a query block of every config begins."""
    return max(BORDER, *query_blocks)
