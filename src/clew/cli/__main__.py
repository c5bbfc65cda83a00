"""``python -m clew.cli``: the console script without an installation."""

from clew.cli.main import main

main()
