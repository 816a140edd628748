"""Whole corpora before training: tokens, embeddings of documents, answer masks, and windows of related documents."""
