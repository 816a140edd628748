"""Decoding with drafts: trees of guessed tokens, attention over a cache and a tree, and sampling."""
