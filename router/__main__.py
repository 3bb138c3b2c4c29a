"""`python -m router`, and the entry point of the `baton` script."""

import os
import sys

from router import cli


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    code: object
    try:
        code = _run()
    except KeyboardInterrupt:
        # Ctrl-C where no command has taken it over: leave quietly, as the shell expects.
        code = 130
    except BrokenPipeError:
        # The reader of our output has gone (`baton workers list | head`). What is left of it goes
        # nowhere, or Python would try again at its exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    raise SystemExit(code)


def _run() -> object:
    """What to exit with."""
    code: object
    try:
        code = cli.main()
    except SystemExit as end:  # after --help
        code = end.code
    if sys.stdout is not None:
        # Short output still waits here, and only now it shows whether somebody reads it.
        sys.stdout.flush()
    return code


if __name__ == "__main__":
    main()
