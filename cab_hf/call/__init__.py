"""One call of attention: its arguments and their checks, its mask, and its token order."""
