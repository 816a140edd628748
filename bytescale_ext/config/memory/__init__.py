"""Configuration of activation policies, of model states in pages, and of tables in host memory."""
