"""Parts of commands: settings, models, provenance, and a log from which a killed run continues."""
