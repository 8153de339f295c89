"""One module for each command of `tuiwork`."""
