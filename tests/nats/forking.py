"""`python -m tests.nats.forking`: starts `baton` processes that cost a fork instead of an import.

Importing the router takes most of a second of CPU, and these tests start dozens of processes. So
one process imports everything once and forks for each command; the child then runs the command
line as `python -m router` would. Whoever asked hears its process id and, later, its exit code.

A line of JSON on standard input is {"words", "log"}, answered by {"pid"}; {"pid", "code"} follows
when it has ended.
"""

import gc
import json
import os
import select
import signal
import sys
import traceback
from typing import NoReturn

import router.agent.app
import router.agent.command
import router.app
import router.cli
import router.sim.server  # noqa: F401
from router.cli import main as run


def main() -> None:
    """Until standard input ends."""
    gc.freeze()
    reaping, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffered = b""
    while True:
        ready = select.select([0, reaping], [], [])[0]
        if reaping in ready:
            os.read(reaping, 4096)
            _reap()
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                _say(pid=_fork(asked["words"], asked["log"]))


def _say(**members: int) -> None:
    os.write(1, json.dumps(members).encode() + b"\n")


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(pid=pid, code=os.waitstatus_to_exitcode(status))


def _fork(words: list[str], log: str) -> int:
    pid = os.fork()
    if pid == 0:
        _become(words, log)
    return pid


def _become(words: list[str], log: str) -> NoReturn:
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["baton", *words]
        code = run(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
