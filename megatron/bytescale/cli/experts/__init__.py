"""``bytescale experts``: what placements make of recorded loads of experts."""
