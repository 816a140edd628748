"""Turn documents on disk into the micro-batches of one rank."""
