"""`python -m raydist` is the `raydist` command."""

import sys

if __name__ == "__main__":
    # Python has put the working directory first: a file there would be imported in place of an installed package.
    sys.path.append(sys.path.pop(0))
    from raydist.cli.main import main

    main()
