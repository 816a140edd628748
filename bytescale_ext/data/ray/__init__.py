"""Remote loading in Ray actors: servers tokenize texts, a scheduler plans steps, and loaders fetch both."""
