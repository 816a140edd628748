"""Windows of related documents: clustering, greedy fit, validation, and simpler builders for comparison."""
