"""Settings that `cab_hf.calibrate` fits to a model: a threshold, or the anchors of a cascade."""
