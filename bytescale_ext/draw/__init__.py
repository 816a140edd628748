"""Pictures of plans and measurements, drawn with matplotlib."""
