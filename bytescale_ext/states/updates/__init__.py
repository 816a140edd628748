"""Updates of Adam's states that do not hold a step up."""
