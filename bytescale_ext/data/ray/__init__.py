"""Load and plan in Ray actors: servers that hold texts, a scheduler that plans, loaders that fetch."""
