"""Decoding with drafts: trees of guessed tokens, attention over a cache and a tree, and what a model accepts."""
