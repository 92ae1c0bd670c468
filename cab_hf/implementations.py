"""The names under which attention of cab_hf is registered with transformers."""

# blocks where a text is long enough for them, and exact attention throughout
NAMES = ("cab", "cab_dense")
