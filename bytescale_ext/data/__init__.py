"""From documents on disk to the micro-batches of one rank."""
