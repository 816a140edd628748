"""Configuration of activation policies and their offloading, and of model states in pages."""
