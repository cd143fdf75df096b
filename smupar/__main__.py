"""``smupar`` and ``python -m smupar``."""

import sys


def start() -> None:
    """Runs the command line. Ctrl-C ends it without a traceback, even while the command line itself is being loaded."""
    try:
        from smupar.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    start()
