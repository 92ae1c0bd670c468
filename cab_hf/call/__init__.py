"""One call of attention: its mask, the order of its tokens, and the checks of its arguments."""
