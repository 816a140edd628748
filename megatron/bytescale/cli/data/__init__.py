"""``bytescale data``: what happens to a corpus before training on long contexts."""
