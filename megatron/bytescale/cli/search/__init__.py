"""``bytescale search``: its options, table and launch script."""
