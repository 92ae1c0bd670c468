"""The probes of `fidelity`: the questions to a method, by name."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from cab_hf.data.tasks import TASKS

PASS, QUESTION_FIRST, MULTI_KEY = "pass", "question_first", "multi_key"
RECALL, PERPLEXITY = "recall", "perplexity"
# probes that predict the first token of query blocks: the query before it is in another block, and
# its keys were selected without the predicted token
RECALL_BORDER, PERPLEXITY_BORDER = "recall_border", "perplexity_border"
RECALLS, PERPLEXITIES = (RECALL, RECALL_BORDER), (PERPLEXITY, PERPLEXITY_BORDER)
# tokens after a prompt: the method reads the prompt, and dense attention reads the following tokens
# through the KV cache
CONTINUATION, ASKED = "continuation", "asked"
# tokens at the end of every turn of a chat, which reads all turns through one KV cache
TURNS, TURN_COUNT = "turns", 5
# tokens after a prompt that the method decodes one at a time; GREEDY generates them
DECODE, DECODE_ASKED, GREEDY = "decode", "decode_asked", "greedy"
DECODES = (DECODE, DECODE_ASKED, GREEDY)
WITH_KEYS_ASKED = (ASKED, DECODE_ASKED)
PROMPTS = (CONTINUATION, ASKED, TURNS, *DECODES, PASS, QUESTION_FIRST, MULTI_KEY)
PROBES = (*PROMPTS, *RECALLS, *PERPLEXITIES, *TASKS)
# name that stands for the probes of all tasks, and for the mean over tasks in results
ALL_TASKS = "tasks"
# default probes
USUAL = (CONTINUATION, ASKED, PASS, QUESTION_FIRST, RECALL, PERPLEXITY)
CONTINUED = 256  # tokens that are read after a prompt
CONTINUED_SHARE = 8  # at most 1 / 8 of a text is read after its prompt
# largest number of tokens in a batch of decoded texts; batches share the launch costs of a step
TOKENS_AT_ONCE = 2**17
PROMPTED = (
    PASS,
    QUESTION_FIRST,
    MULTI_KEY,
)  # probes that read prompts; other probes read documents
# number of keys in the prompts of a probe, each with a name; other prompts have one key
NAMED_KEYS = {MULTI_KEY: 4}
BORDER = 128  # tokens, a multiple of all query blocks up to this size
NOISE = "noise"  # the built-in text of five sentences
# the fields that identify a question; all methods answer the same questions
question_of = itemgetter("text", "length", "probe", "depth", "index")


def border_of(query_blocks: Iterable[int]) -> int:
    """Return a distance in tokens whose multiples are starts of query blocks in every config.

    Args:
        query_blocks: tokens per query block of each config.
    """
    return max([BORDER, *query_blocks])
