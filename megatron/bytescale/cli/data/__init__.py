"""``bytescale data``: clean, mix and sculpt a corpus for training on long contexts."""
