"""Fixed mixing: weights that need no product of queries and keys."""
