"""The command line: ``subquad``. One file a verb."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``subquad`` command."""
    try:
        from subquad.cli.app import app
    except ImportError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.stderr.write("the command line needs typer and rich: pip install 'subquad[cli]'\n")
        sys.exit(2)
    app()
