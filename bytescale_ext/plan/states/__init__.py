"""Which pages of host memory hold an optimizer's states, and the moves of one step."""
