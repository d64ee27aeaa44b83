"""`python -m dubito` is the command `dubito`."""

from dubito.cli import main

main()
