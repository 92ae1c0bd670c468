"""Fits of `cab_hf.calibrate` to a model: a mass threshold, or the anchors of a cascade."""
