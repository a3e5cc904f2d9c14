"""The rows of a cache layer as MLX arrays, and the ways to write and read them."""
