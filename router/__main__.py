"""`python -m router`, and the entry point of the `baton` script."""

import sys

from router import cli


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    try:
        code = cli.main()
    except KeyboardInterrupt:
        # Ctrl-C where no command has taken it over: leave quietly, as the shell expects.
        code = 130
    except BrokenPipeError:
        # The reader of our output has gone (`baton workers list | head`).
        sys.stderr.close()
        code = 141
    sys.exit(code)


if __name__ == "__main__":
    main()
