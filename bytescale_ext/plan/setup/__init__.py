"""Setup of a run as one value, which determines layers, memory, costs, choices, planner and forecasts."""
