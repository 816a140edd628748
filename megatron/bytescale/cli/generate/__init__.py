"""``bytescale generate`` and ``bytescale draft``: their options and what they print."""
