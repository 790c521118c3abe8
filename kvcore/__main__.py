"""`python -m kvcore`."""

from kvcore.cli import main

main()
