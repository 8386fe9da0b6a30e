"""MLX parts that methods are built from, and the count of what a cache really holds."""
