"""``bytescale states``: what Adam's states in pages of host memory take and save."""
