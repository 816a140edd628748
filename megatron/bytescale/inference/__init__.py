"""Decoding with a trained model and its draft heads, on one device or cut over several."""
