"""Functions that escape names for Markdown."""

from __future__ import annotations

import re

# an underscore inside a word is plain; at the edge of a word it marks emphasis
MARKS = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")


def plain(text: str) -> str:
    """Return ``text`` in one line that Markdown shows unchanged, in tables too."""
    return MARKS.sub(r"\\\g<0>", " ".join(text.split()))


def code(text: str) -> str:
    """Return ``text`` in one line as code, in tables too."""
    text = " ".join(text.split())
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    room = " " if text.startswith("`") or text.endswith("`") else ""
    # in a table a bar ends a cell, even inside code
    return fence + room + text.replace("|", r"\|") + room + fence
