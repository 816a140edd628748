"""The setup of a run as one value. Layers, memory, costs, choices, planner and forecasts all follow from it."""
