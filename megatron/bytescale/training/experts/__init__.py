"""What features of experts install and run around the training loop."""
