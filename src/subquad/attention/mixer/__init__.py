"""Token mixers: layers that mix the tokens of a sequence without queries, keys and values."""
