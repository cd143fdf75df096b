"""``python -m smupar``."""

from smupar.cli.main import main

main()
