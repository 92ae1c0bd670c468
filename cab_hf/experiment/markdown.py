"""Functions that convert a string to Markdown which is displayed as the same string."""

from __future__ import annotations

import re

# characters with a meaning in Markdown. Underscores inside a word have no meaning
MARKDOWN_CHARACTERS = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")


def escape_markdown(text: str) -> str:
    """Join the lines of ``text``, and escape each of `MARKDOWN_CHARACTERS` with a backslash."""
    return MARKDOWN_CHARACTERS.sub(r"\\\g<0>", " ".join(text.split()))


def format_code(text: str) -> str:
    """Join the lines of ``text``, and format the line as inline code for prose and tables."""
    text = " ".join(text.split())
    max_backticks = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (max_backticks + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    # a vertical bar ends the cell of a table, even inside code
    return fence + space + text.replace("|", r"\|") + space + fence
