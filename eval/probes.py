"""The names and constants of the probes of `fidelity`; a probe is a kind of prompt and of score."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from cab_hf.data.tasks import TASKS

PASS, QUESTION_FIRST, MULTI_KEY = "pass", "question_first", "multi_key"
RECALL, PERPLEXITY = "recall", "perplexity"
# Probes that predict the first token of a query block. The query that predicts this token is the
# last of the block before, so that the predicted token took no part in selecting the query's keys.
RECALL_BORDER, PERPLEXITY_BORDER = "recall_border", "perplexity_border"
RECALL_PROBES, PERPLEXITY_PROBES = (RECALL, RECALL_BORDER), (PERPLEXITY, PERPLEXITY_BORDER)
# Probes that predict tokens after a prompt. The method reads the prompt, and dense attention reads
# the following tokens through the KV cache.
CONTINUATION, ASKED = "continuation", "asked"
# the probe that predicts the last tokens of every turn of a chat, whose turns share one KV cache
TURNS, NUM_TURNS = "turns", 5
# Probes in which the method computes the tokens after a prompt in decode steps. For GREEDY, the
# model generates these tokens; for the other probes, they are tokens of the document.
DECODE, DECODE_ASKED, GREEDY = "decode", "decode_asked", "greedy"
DECODE_PROBES = (DECODE, DECODE_ASKED, GREEDY)
ASKED_KEY_PROBES = (ASKED, DECODE_ASKED)
PROMPT_PROBES = (CONTINUATION, ASKED, TURNS, *DECODE_PROBES, PASS, QUESTION_FIRST, MULTI_KEY)
PROBES = (*PROMPT_PROBES, *RECALL_PROBES, *PERPLEXITY_PROBES, *TASKS)
# in --probes, the name for all tasks; in rows, the field with the mean over tasks
ALL_TASKS = "tasks"
# default probes
DEFAULT_PROBES = (CONTINUATION, ASKED, PASS, QUESTION_FIRST, RECALL, PERPLEXITY)
MAX_CONTINUATION_TOKENS = 256  # tokens that are read after a prompt
# at most 1 / 8 of a document is read after the prompt, which is its beginning
CONTINUATION_DIVISOR = 8
# Largest number of tokens in a batch of sequences that are decoded together. Batches save time,
# because all sequences of a batch share the kernel launches of a decode step.
MAX_BATCH_TOKENS = 2**17
# probes that use passkey prompts of `Haystack`; all other probes use documents
PASSKEY_PROBES = (PASS, QUESTION_FIRST, MULTI_KEY)
# probe -> number of named keys in its passkey prompts; other probes have one key without a name
NUM_KEYS_BY_PROBE = {MULTI_KEY: 4}
# smallest distance between predicted block starts, in tokens; the usual query blocks divide it
MIN_BORDER_DISTANCE = 128
NOISE_TEXT_NAME = "noise"  # the built-in text of five sentences
# the key of a question: the fields of a case that are equal for all methods
get_question = itemgetter("text", "length", "probe", "depth", "index")


def find_border(query_blocks: Iterable[int]) -> int:
    """Return a number of tokens whose multiples are starts of query blocks in every config.

    This is true only if all query blocks divide the result, which `fidelity_settings` checks.

    Args:
        query_blocks: tokens per query block of each config.
    """
    return max([MIN_BORDER_DISTANCE, *query_blocks])
