"""The commands that talk to a running router over its HTTP API.

They say nothing about the router they run beside: everything comes from the answers, and an error
is shown in the words of the router that made it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
from attrs import frozen

from router.commands.columns import columns
from router.reasons import in_words

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 30.0
COLUMNS = ("id", "state", "breaker", "inflight", "role", "engine", "models", "url", "origin")

Act = Callable[[argparse.Namespace, "Api"], str]


class RemoteError(Exception):
    """The router cannot be reached, or it refused; the message is one line."""


@frozen
class Api:
    """The HTTP API of one router."""

    url: str
    admin_key: str | None

    def ask(self, method: str, path: str, body: dict[str, object] | None = None) -> bytes:
        """The body of a good answer; anything else raises RemoteError."""
        import httpx

        headers = {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}
        try:
            # Proxies of the environment are for the outside world, not for one's own router.
            with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False) as client:
                url = self.url.rstrip("/") + path
                answer = client.request(method, url, json=body, headers=headers)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as problem:
            said = f"{self.url or 'nothing'}: not the URL of a router (http://HOST:PORT)"
            raise RemoteError(said) from problem
        except httpx.HTTPError as problem:
            raise RemoteError(f"{self.url}: {in_words(problem)}") from problem
        if not answer.is_success:
            raise RemoteError(reason_of(answer.status_code, answer.content))
        return answer.content


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


def reason_of(status: int, body: bytes) -> str:
    """One line about an answer that is an error, in the router's own words where it has some."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, msgspec.ValidationError):
        return f"the answer is {status}, not from a router's API"
    return f"{error.message} ({error.code or status})"


def add_admin_key(parser: argparse.ArgumentParser) -> None:
    """`--admin-key`, as every command has it that talks to a router's API."""
    parser.add_argument(
        "--admin-key",
        default=os.environ.get("BATON_ADMIN_KEY") or None,
        metavar="KEY",
        help="the router's --admin-key; in the environment BATON_ADMIN_KEY",
    )


# --- baton workers ---------------------------------------------------------------------------


def add_workers_commands(parser: argparse.ArgumentParser) -> None:
    """`baton workers list|add|drain|remove`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    listing = _add_action(actions, "list", "show the workers and their states", _list)
    listing.add_argument("--json", action="store_true", help="print the router's answer as it is")

    adding = _add_action(actions, "add", "add a worker; it gets requests once it is ready", _add)
    adding.add_argument("worker", metavar="URL", help="as in --worker-urls: http://h:p,id=w1")
    adding.add_argument("--role", choices=("mixed", "prefill", "decode"), default="mixed")

    draining = _add_action(actions, "drain", "give a worker no new requests", _drain)
    draining.add_argument("id", metavar="ID")
    draining.add_argument(
        "--timeout-secs", type=float, metavar="SECONDS", help="window for the requests it has"
    )

    removing = _add_action(actions, "remove", "remove a worker", _remove)
    removing.add_argument("id", metavar="ID")


def _add_action(
    actions: argparse._SubParsersAction[Any], name: str, text: str, act: Act
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False
    )
    parser.add_argument(
        "--router-url",
        default=os.environ.get("BATON_ROUTER_URL") or DEFAULT_URL,
        metavar="URL",
        help=f"the router; in the environment BATON_ROUTER_URL (default {DEFAULT_URL})",
    )
    add_admin_key(parser)
    parser.set_defaults(command=_run, act=act)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    act: Act = arguments.act
    try:
        print(act(arguments, Api(arguments.router_url, arguments.admin_key)))
    except (RemoteError, ValueError) as problem:
        print(f"baton workers: {problem}", file=sys.stderr)
        return 1
    return 0


class _Row(msgspec.Struct):
    """What is shown of a worker; fields that another version does not send are left empty."""

    id: str
    url: str = ""
    role: str = ""
    engine: str = ""
    state: str = ""
    breaker: str = ""
    inflight: int = 0
    models: tuple[str, ...] = ()
    origin: str = ""


class _Workers(msgspec.Struct):
    workers: tuple[_Row, ...]


def _list(arguments: argparse.Namespace, api: Api) -> str:
    answer = api.ask("GET", "/v1/workers")
    if arguments.json:
        return answer.decode()
    try:
        rows = msgspec.json.decode(answer, type=_Workers).workers
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise RemoteError(f"{api.url}: not a list of workers: {problem}") from problem
    return columns([COLUMNS, *(tuple(_cell(getattr(row, c)) for c in COLUMNS) for row in rows)])


def _add(arguments: argparse.Namespace, api: Api) -> str:
    from router.workerspec import WorkerSpec

    spec = WorkerSpec.parse(arguments.worker, role=arguments.role)
    body: dict[str, object] = {"url": spec.url, "id": spec.id, "role": spec.role}
    if spec.engine != "auto":
        body["engine"] = spec.engine
    if spec.group is not None:
        body["group"] = spec.group
    if spec.bootstrap_port is not None:
        body["bootstrap_port"] = spec.bootstrap_port
    if spec.bootstrap_host is not None:
        body["bootstrap_host"] = spec.bootstrap_host
    if spec.dp_size != 1:
        body["dp_size"] = spec.dp_size
    api.ask("POST", "/v1/workers", body)
    return f"{spec.id}: added"


def _drain(arguments: argparse.Namespace, api: Api) -> str:
    timeout = arguments.timeout_secs
    body: dict[str, object] = {} if timeout is None else {"timeout_secs": timeout}
    api.ask("POST", f"/v1/workers/{quote(arguments.id, safe='')}/drain", body)
    return f"{arguments.id}: draining"


def _remove(arguments: argparse.Namespace, api: Api) -> str:
    api.ask("DELETE", f"/v1/workers/{quote(arguments.id, safe='')}")
    return f"{arguments.id}: removed"


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "-"
    return str(value) or "-"
