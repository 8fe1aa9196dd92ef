"""Files on disk: the run folder, JSON files, the cache, locks."""
