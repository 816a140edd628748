"""The frozen configuration of each feature."""
