"""The process: the command line, and what stops it while that is still being imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; its own errors and stops are told by itself (see `cli`)."""
    try:
        from bertvision.cli import app

        app()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped; nothing was begun.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
