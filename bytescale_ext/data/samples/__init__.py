"""Documents and samples: lengths, texts, epochs, and packed micro-batches."""
