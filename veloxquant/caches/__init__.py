"""MLX parts that methods are built from, and the door that puts planned caches on a model."""
