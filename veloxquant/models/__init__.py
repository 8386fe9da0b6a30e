"""A model: found, traced in a bounded worker, or read statically and said so."""
