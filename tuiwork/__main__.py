"""`python -m tuiwork` is the `tuiwork` command."""

from tuiwork.cli import main

main()
