"""What every long run shares: its settings, its provenance and a log that survives a kill."""
