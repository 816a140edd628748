"""Work on a whole corpus before training: its tokens, what its documents are about, and its windows in a file."""
