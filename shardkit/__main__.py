"""`python -m shardkit`: the command line without the console script."""

from shardkit.cli import main

if __name__ == "__main__":
    main()
