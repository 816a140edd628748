"""``bytescale search``: its options, its table and the launch script that it writes."""
