"""What activation policies, and the record of memory, install and run around the training loop."""
