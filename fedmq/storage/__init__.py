"""Files on disk: run folder, JSON files, cache, locks."""
