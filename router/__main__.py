"""`python -m router`, and the entry point of the `baton` script."""

import io
import os
import sys

from router import cli


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    code: object
    _settle_streams()
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


def _settle_streams() -> None:
    """Standard streams that can be used whatever they were started with."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Closed (`>&-`), and it would become the next socket, to which log lines would be
            # written. What is open below it makes this the lowest one that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every terminal knows every character of a demo, or of a worker's id.
        sys.stdout.reconfigure(errors="replace")


def _run() -> object:
    """What to exit with."""
    code: object
    try:
        code = cli.main()
    except SystemExit as end:  # after --help
        code = end.code
    # Short output still waits here, and only now it shows whether somebody reads it.
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    main()
