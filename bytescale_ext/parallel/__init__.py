"""Communication between HDP ranks: point-to-point exchange and agreement on plans."""
