"""Pure decisions: values made from lengths and sizes. Standard library and numpy only."""
