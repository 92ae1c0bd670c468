"""The settings that `cab_hf.calibrate` fits to a model: a mass threshold, or a cascade."""
