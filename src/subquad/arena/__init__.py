"""Mechanisms side by side: the demonstration, speed, memory and approximation error."""
