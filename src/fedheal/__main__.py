"""`python -m fedheal`."""

from fedheal.cli import main

main()
