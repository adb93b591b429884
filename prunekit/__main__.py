"""`python -m prunekit`."""

from prunekit.cli import main

if __name__ == "__main__":
    main()
