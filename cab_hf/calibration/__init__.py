"""What `cab_hf.calibrate` fits to a model: a threshold, or which layers choose for which."""
