"""`python -m warploom`: the command line, where no script is installed."""

from warploom.cli import main

if __name__ == "__main__":
    main()
