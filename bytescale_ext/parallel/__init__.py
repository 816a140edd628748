"""Communication between HDP ranks."""
