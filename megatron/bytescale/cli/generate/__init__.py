"""``bytescale generate``, ``draft`` and ``convert``: their options and what they print."""
