"""`pays`: measured break-even points between sparse and dense attention, by device type.

`CabConfig.min_length` decides for whole prompts. A prompt that continues a long cache, such as a
question about a document, can have too few queries for sparse attention to pay: the keys of the
whole cache are scored for a few query blocks. The points are in break_even.json.
`python -m cab_hf.eval.break_even` measures and writes them.
"""

from __future__ import annotations

import json
from pathlib import Path

PATH = Path(__file__).with_suffix(".json")
# device type -> ascending (keys, least queries for which sparse attention is not slower), in tokens
POINTS: dict[str, tuple[tuple[int, int], ...]] = {
    device: tuple((keys, queries) for keys, queries in measured["points"])
    for device, measured in json.loads(PATH.read_text("utf-8")).items()
}


def pays(q_length: int, kv_length: int, device_type: str) -> bool:
    """Return True unless measurements say that dense attention is faster.

    Args:
        q_length: Queries of the prompt, in tokens.
        kv_length: Keys, cache included, in tokens.
        device_type: Torch device type, e.g. ``"cuda"``.
    """
    return q_length >= least_queries(kv_length, device_type)


def least_queries(kv_length: int, device_type: str) -> int:
    """Return the least number of queries for which sparse attention is not slower than dense.

    The number is that of the last measured length that is not above ``kv_length``. It is 0 if no
    such length was measured.
    """
    least = 0
    for keys, queries in POINTS.get(device_type, ()):
        if keys <= kv_length:
            least = queries
    return least
