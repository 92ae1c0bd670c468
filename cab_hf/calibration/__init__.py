"""Fitting CAB to a model: which head gets what budget, or which layers choose blocks for which."""

from cab_hf.calibration.passes import calibrate

__all__ = ["calibrate"]
