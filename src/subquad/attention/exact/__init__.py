"""Exact attention: the truth that every other mechanism is measured against."""
