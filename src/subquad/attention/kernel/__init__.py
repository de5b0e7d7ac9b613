"""Kernel attention: feature maps and the linear engine that sums them."""
