"""Every formula for the time, memory and bytes of a model, each with its source."""
