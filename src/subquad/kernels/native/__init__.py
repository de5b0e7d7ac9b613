"""The linear engine in C++ for CPUs, compiled on the machine that runs it."""

from __future__ import annotations
