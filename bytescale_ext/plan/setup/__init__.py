"""What a step is planned for, as one value: layers, memory, costs, choices and forecasts all follow from it."""
