"""Hybrid attention: mechanisms joined over heads, or over parts of the keys."""
