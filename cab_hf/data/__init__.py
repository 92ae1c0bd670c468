"""Documents, prompts and questions for measurements: filler text with inserted facts."""
