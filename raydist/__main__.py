"""The `raydist` command, and `python -m raydist`."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Python has put the working directory first: a file there would be imported in place of Python's or an installed module.
    sys.path.append(sys.path.pop(0))

import signal


def main() -> None:
    """Runs the command. Ctrl-C during its imports, which may take seconds, ends it without a traceback."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from raydist.cli.main import main as command

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
