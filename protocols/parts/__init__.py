"""What several methods or objectives are built from."""
