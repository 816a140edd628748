"""Windows of related documents: clusters, the greedy fit inside them, the check of windows, and simpler builders."""
