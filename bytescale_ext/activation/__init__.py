"""What is remembered of a layer between its forward and its backward pass, and the memory that it takes."""
