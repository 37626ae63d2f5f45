"""`python -m raydist`: the same as the `raydist` command."""

from raydist.cli.main import main

if __name__ == "__main__":
    main()
