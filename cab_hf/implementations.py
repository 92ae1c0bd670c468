"""The names under which attention of cab_hf is registered with transformers."""

# blocks where a text is long enough for them, by any predictor or by the published one
CAB_FRC = "cab_frc"
SPARSE = ("cab", CAB_FRC)
# and exact attention throughout
NAMES = (*SPARSE, "cab_dense")
