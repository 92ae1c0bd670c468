"""Names in Markdown, as users and files have them."""

from __future__ import annotations

import re

# an underscore inside a word is one; beside a word it begins or ends what is emphasised
MARKS = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")


def plain(text: str) -> str:
    """``text`` in one line that Markdown shows as it is, in a table as well."""
    return MARKS.sub(r"\\\g<0>", " ".join(text.split()))


def code(text: str) -> str:
    """``text`` in one line as code, in a table as well."""
    text = " ".join(text.split())
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    room = " " if text.startswith("`") or text.endswith("`") else ""
    # in a table a bar ends a cell, in code as well
    return fence + room + text.replace("|", r"\|") + room + fence
