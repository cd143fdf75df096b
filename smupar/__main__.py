"""``python -m smupar``."""

from smupar.cli import main

main()
