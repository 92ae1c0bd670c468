"""Shared parts of long runs: settings, provenance, and a log that survives a kill."""
