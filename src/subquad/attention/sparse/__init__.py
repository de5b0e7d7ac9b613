"""Sparse attention: patterns of key blocks and the block engine that reads them."""
