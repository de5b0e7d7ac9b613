"""Mechanisms: engines, one file each, and the interface that they share."""
