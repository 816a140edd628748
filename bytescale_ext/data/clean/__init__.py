"""Clean a corpus before training: read its sources, filter, mask, remove duplicates and report, on datatrove."""
