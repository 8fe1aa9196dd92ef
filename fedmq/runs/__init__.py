"""Results of finished runs: records, model files, reports."""
