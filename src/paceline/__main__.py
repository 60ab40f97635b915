"""`python -m paceline`, so that torchrun can start it too."""

from paceline.cli import main

main()
