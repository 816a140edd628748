"""Decoding with a trained model and its draft heads, on one device or split over several."""
