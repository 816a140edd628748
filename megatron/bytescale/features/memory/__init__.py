"""Features about what a device holds: activation policies, memory plans and their record, and model states."""
