"""``python -m kvant``: the same as the program ``kvant``."""

from kvant.cli import main

main()
