"""The probes of `fidelity`: the questions to a method, by name."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from cab_hf.data.tasks import TASKS

PASS, QUESTION_FIRST, MULTI_KEY = "pass", "question_first", "multi_key"
RECALL, PERPLEXITY = "recall", "perplexity"
# tokens at the start of a query block: no earlier query selected keys with them
RECALL_BORDER, PERPLEXITY_BORDER = "recall_border", "perplexity_border"
RECALLS, PERPLEXITIES = (RECALL, RECALL_BORDER), (PERPLEXITY, PERPLEXITY_BORDER)
# tokens after a prompt: the method reads the prompt, and the KV cache serves the rest
CONTINUATION, ASKED = "continuation", "asked"
# the same in every turn of a chat over one KV cache, and the number of turns
TURNS, TURN_COUNT = "turns", 5
# the same if the method also decodes, and its generated text
DECODE, DECODE_ASKED, GREEDY = "decode", "decode_asked", "greedy"
DECODES = (DECODE, DECODE_ASKED, GREEDY)
WITH_KEYS_ASKED = (ASKED, DECODE_ASKED)
PROMPTS = (CONTINUATION, ASKED, TURNS, *DECODES, PASS, QUESTION_FIRST, MULTI_KEY)
PROBES = (*PROMPTS, *RECALLS, *PERPLEXITIES, *TASKS)
# the probes of all tasks, and the mean over them
ALL_TASKS = "tasks"
# default probes
USUAL = (CONTINUATION, ASKED, PASS, QUESTION_FIRST, RECALL, PERPLEXITY)
# tokens read after a prompt, and the smallest ratio of text to them
CONTINUED, CONTINUED_SHARE = 256, 8
# tokens of all texts that are decoded as one batch, because a step has fixed launch costs
TOKENS_AT_ONCE = 2**17
PROMPTED = (PASS, QUESTION_FIRST, MULTI_KEY)  # probes with prompts; the others are documents
# number of keys in the prompts of a probe; several keys have different names
NAMED_KEYS = {MULTI_KEY: 4}
BORDER = 128  # tokens that are a multiple of query blocks, unless one is larger
NOISE = "noise"  # the text without a file
# identifies a question for all methods
question_of = itemgetter("text", "length", "probe", "depth", "index")


def border_of(query_blocks: Iterable[int]) -> int:
    """Return the tokens between borders at which a query block of every config starts."""
    return max(BORDER, *query_blocks)
