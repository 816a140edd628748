"""Layer specs with document attention, the loss in chunks, multi-token prediction and draft heads."""
