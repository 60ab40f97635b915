"""Run `python -m paceline`, which torchrun can start too."""

from paceline.cli import main

main()
