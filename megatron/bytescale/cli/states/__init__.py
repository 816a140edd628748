"""``bytescale states``: memory, traffic and time of Adam's states in pages of host memory."""
