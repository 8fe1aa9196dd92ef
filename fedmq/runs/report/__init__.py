"""The report of a run and other HTML pages: figures, templates, and the facts that they show."""
