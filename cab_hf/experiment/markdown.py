"""Functions that convert text to Markdown that shows the text unchanged."""

from __future__ import annotations

import re

# characters with a meaning in Markdown. An underscore marks emphasis only at the edge of a word
MARKS = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")


def plain(text: str) -> str:
    """Return ``text`` in one line with escaped characters, for prose and tables."""
    return MARKS.sub(r"\\\g<0>", " ".join(text.split()))


def code(text: str) -> str:
    """Return ``text`` in one line as inline code, for prose and tables."""
    text = " ".join(text.split())
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    # a vertical bar ends the cell of a table, even inside code
    return fence + space + text.replace("|", r"\|") + space + fence
