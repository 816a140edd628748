"""Files of strangers: they run nothing, and each ends in one line."""
