"""One reader per data set or file layout."""
