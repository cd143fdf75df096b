"""``smupar`` and ``python -m smupar``."""

import sys


def start() -> None:
    """Runs the command line. Ctrl-C is answered in one line, also while the command line itself is loaded."""
    try:
        from smupar.cli.main import main

        main()
    except KeyboardInterrupt:
        print("\nsmupar: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    start()
