"""Summary attention: softmax over a few summary keys, and what makes the summaries."""
