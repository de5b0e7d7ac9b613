"""The child process of `subquad.arena.speed.children`."""

from subquad.arena.speed.children import main

main()
