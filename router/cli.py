"""The command line: `baton COMMAND`.

Only reading arguments happens here; each command hands over to the module that does the work, and
that module is imported when the command is known, so that `--help` and mistakes answer at once.
The flags of `serve` are not written down here: they are the table in `router.config`.
A mistake in what was typed is one line on standard error and exit code 2, never a traceback; so
is each mistake in a chart, which is noticed by whoever imports it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args, get_type_hints

import attrs

from router.commands.mistakes import Parser, complain
from router.commands.proving import add_check, add_diagrams
from router.commands.remote import add_workers_commands
from router.config import OPTIONS, load_settings, refuse_unavailable, unavailable_notes
from router.options import Option, SettingsError, to_toml


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    named = next((word for word in words if not word.startswith("-")), "")
    try:
        return _run(named, words)
    except _malformed_chart() as problem:
        for breach in problem.breaches:
            complain(named, breach)
        return 2


def _malformed_chart() -> Any:
    """The class of that exception, once there is one.

    It is asked for while it passes by: a package with such a chart cannot be imported to name it.
    """
    kit = sys.modules.get("statemachines.chart")
    return () if kit is None else kit.MalformedChart


def _run(named: str, words: Sequence[str]) -> int:
    arguments, unknown = build_parser(named).parse_known_args(words)
    if unknown:
        flag = next((word for word in unknown if word.startswith("-")), None)
        problem = (
            f"{unknown[0]} is one argument too many" if flag is None else f"there is no {flag}"
        )
        return complain(named, f"{problem} (see baton {named} --help)")
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def build_parser(named: str) -> Parser:
    """The parser of all commands; only the one that was named learns its arguments.

    Some take them from modules that cost more to import than `baton --help` should.
    """
    # Abbreviated flags would change their meaning as soon as a longer one is added.
    parser = Parser(
        prog="baton",
        allow_abbrev=False,
        description="A router for LLM inference engines. Every request is an explicit, "
        "model-checked state machine.",
    )
    parser.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add, text in COMMANDS:
        description = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(name, help=text, description=description, allow_abbrev=False)
        if name == named:
            add(command)
    return parser


def _version() -> str:
    try:
        return version("baton-router")
    except PackageNotFoundError:
        return "(not installed)"


# --- serve -----------------------------------------------------------------------------------


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.usage = "baton serve [--worker-urls URL ...] [--config FILE] [OPTIONS]"
    parser.epilog = (
        "Every flag has an environment name, BATON_ and the flag in upper case with underscores, "
        "and a key in the file, the flag with underscores. A flag wins over the environment, the "
        "environment over the file. Several values are separated by whitespace in the "
        "environment and are an array in the file."
    )
    parser.add_argument("--config", metavar="FILE", help="read settings from a TOML file")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the merged settings as TOML, secrets masked, and exit",
    )
    add_options(parser, OPTIONS, unavailable_notes())
    parser.set_defaults(command=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from router.agent.settings import env_for_serve

    try:
        settings = load_settings(
            given_words(arguments, OPTIONS),
            env_for_serve(os.environ),
            arguments.config or os.environ.get("BATON_CONFIG") or None,
        )
        if arguments.print_config:
            sys.stdout.write(to_toml(settings, OPTIONS))
            return 0
        refuse_unavailable(settings)
    except SettingsError as problem:
        return complain("serve", problem)
    from router.app import run

    return run(settings)


def add_options(
    parser: argparse.ArgumentParser, table: Iterable[Option], notes: Mapping[str, str]
) -> None:
    """Give the parser one flag for each row; what was typed is read by `given_words`.

    `notes` are added to the help of the options they are keyed by.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in table:
        if each.section not in groups:
            groups[each.section] = parser.add_argument_group(each.section.lower())
        # argparse formats help texts with %.
        text = help_text(each, notes.get(each.key)).replace("%", "%%")
        _add_flag(groups[each.section], each.flag, each, text)
        for alias in each.aliases:
            _add_flag(groups[each.section], alias, each, argparse.SUPPRESS)


def help_text(each: Option, note: str | None) -> str:
    """The line of `--help`: what it means, what it may be, what it is when not given."""
    choices = f"; one of {', '.join(each.kind.choices)}" if each.kind.choices else ""
    default = f" (default {each.default_text})" if each.default_text else ""
    return f"{each.help}{choices}{default}" + (f" [{note}]" if note else "")


def _add_flag(group: argparse._ArgumentGroup, spelling: str, each: Option, text: str) -> None:
    first, *others = each.kind.metavar.split()
    if each.kind.several:
        metavar = (first, others[0] if others else first)
        group.add_argument(
            spelling, dest=each.key, nargs="+", action="extend", metavar=metavar, help=text
        )
    elif each.kind.stands_alone:
        group.add_argument(
            spelling, dest=each.key, nargs="?", const="true", metavar=first, help=text
        )
    else:
        group.add_argument(spelling, dest=each.key, metavar=first, help=text)


def given_words(arguments: argparse.Namespace, table: Iterable[Option]) -> dict[str, list[str]]:
    """The words that were typed for each option that was given."""
    found: dict[str, list[str]] = {}
    for each in table:
        typed: str | list[str] | None = getattr(arguments, each.key)
        if isinstance(typed, str):
            found[each.key] = [typed]
        elif typed is not None:
            # A list that a shell or a compose file has quoted arrives as one word.
            found[each.key] = [word for text in typed for word in text.split() or [""]]
    return found


# --- agent -----------------------------------------------------------------------------------


def _add_agent(parser: argparse.ArgumentParser) -> None:
    from router.agent.settings import INFERA_NAMES, OPTIONS

    parser.usage = "baton agent --engine-url URL --nats URL [OPTIONS]"
    parser.epilog = (
        "Every flag has an environment name, BATON_ and the flag in upper case with underscores; a "
        "flag wins over the environment. Where neither is given, these count as well: "
        f"{', '.join(INFERA_NAMES.values())}. Of SIGTERM and SIGINT the first begins a drain and "
        "the second ends the agent at once."
    )
    parser.add_argument(
        "--drain",
        action="store_true",
        help="ask the running agent of that --id (or --engine-url) to drain, over NATS, and wait "
        "until it has; for preStop. Exit code 0 also where no such agent runs",
    )
    add_options(parser, OPTIONS, {})
    parser.set_defaults(command=_agent)


def _agent(arguments: argparse.Namespace) -> int:
    from router.agent.settings import OPTIONS, load_settings

    try:
        settings = load_settings(given_words(arguments, OPTIONS), os.environ)
        settings.nats_url()
        if arguments.drain:
            settings.worker_id()
        else:
            settings.spec()
    except SettingsError as problem:
        return complain("agent", problem)
    from router.agent import command

    return command.drain(settings) if arguments.drain else command.run(settings)


# --- the other commands ----------------------------------------------------------------------

SIM_HELP = {
    "engine": "whose API, answers and ways to die are imitated",
    "host": "address to listen on",
    "port": "port to listen on; 0 picks a free one",
    "name": "what faults and log lines call it",
    "model": "name of the one model it serves",
    "context_length": "longest sequence in tokens",
    "token_seconds": "time between two tokens",
    "first_token_seconds": "time before the first token",
    "tokens_per_chunk": "tokens that leave in one event",
    "eos_every": "an answer ends by itself once in so many tokens; 0 = never",
    "seed": "engines with one seed give the same answers",
    "ambiguous": "now and then write a word as pieces that encode differently when read back",
    "keep_alive_seconds": "how long an idle connection is kept",
    "sigterm": "what SIGTERM does; native = what the imitated engine does",
    "role": "half of a prefill/decode pair, or all of it",
    "bootstrap_port": "where a half of a pair hands over its KV cache; 0 picks a free port",
    "faults": "what goes wrong and when, as described below",
}
"""The settings of a simulated engine that are flags; types and defaults are its own."""


def _add_sim(parser: argparse.ArgumentParser) -> None:
    from router.sim.settings import SimSettings

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _fault_help()
    types = get_type_hints(SimSettings)
    fields = attrs.fields_dict(SimSettings)
    for name, text in SIM_HELP.items():
        _add_sim_flag(parser, fields[name], get_args(types[name]), text.replace("%", "%%"))
    parser.set_defaults(command=_sim)


def _fault_help() -> str:
    """The language of faults as its module explains it, and every kind with its parameters."""
    from router.sim import fault_kinds, faults

    text = (faults.__doc__ or "").partition("\n")[2].rstrip()
    return f"faults:\n{text}\n\nkinds:\n{fault_kinds.manual()}"


def _add_sim_flag(
    parser: argparse.ArgumentParser,
    field: attrs.Attribute[object],
    choices: tuple[str, ...],
    text: str,
) -> None:
    flag, kind = "--" + field.name.replace("_", "-"), type(field.default)
    default = f" (default {field.default})"
    if kind is bool:
        parser.add_argument(flag, action="store_true", help=text)
    elif kind is tuple:
        parser.add_argument(
            flag, nargs="+", action="extend", default=[], metavar=("FAULT", "FAULT"), help=text
        )
    elif kind is str and choices:
        parser.add_argument(flag, choices=choices, default=field.default, help=text + default)
    else:
        metavar = {int: "N", float: "SECONDS"}.get(kind, "TEXT")
        parser.add_argument(
            flag, type=kind, default=field.default, metavar=metavar, help=text + default
        )


def _sim(arguments: argparse.Namespace) -> int:
    from router.sim.server import run
    from router.sim.settings import SimSettings

    try:
        settings = SimSettings(**{name: getattr(arguments, name) for name in SIM_HELP})
    except ValueError as problem:
        return complain("sim", problem)
    return run(settings)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nats",
        action="store_true",
        help="instead: agents on a real NATS server, all of them drained under load",
    )

    def demo(arguments: argparse.Namespace) -> int:
        if arguments.nats:
            from router.commands.demo_nats import main
        else:
            from router.commands.demo import main
        return main()

    parser.set_defaults(command=demo)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    from router.commands.replaying import add_replay_arguments

    add_replay_arguments(parser)


def _add_watch(parser: argparse.ArgumentParser) -> None:
    from router.commands.watching import add_watch_arguments

    add_watch_arguments(parser)


def _add_top(parser: argparse.ArgumentParser) -> None:
    from router.commands.top import add_top_arguments

    add_top_arguments(parser)


def _add_conform(parser: argparse.ArgumentParser) -> None:
    from router.conform.command import add_arguments

    add_arguments(parser)
    parser.set_defaults(command=_conform)


def _conform(arguments: argparse.Namespace) -> int:
    from router.conform.command import BadCall, run
    from router.conform.routers import BadRouter

    try:
        return run(arguments)
    except (BadCall, BadRouter) as problem:
        return complain("conform", problem)


COMMANDS: tuple[tuple[str, Callable[[argparse.ArgumentParser], None], str], ...] = (
    ("serve", _add_serve, "run the router"),
    ("agent", _add_agent, "serve the engine beside it to routers over NATS"),
    ("sim", _add_sim, "run a simulated engine"),
    ("demo", _add_demo, "watch a small fleet lose workers, in this terminal"),
    ("diagrams", add_diagrams, "write the state diagrams and the generated parts of docs/"),
    ("check", add_check, "model-check the state machines"),
    ("watch", _add_watch, "show the transitions of a running router as they happen"),
    ("top", _add_top, "show a running router's workers and requests, every two seconds"),
    ("replay", _add_replay, "run a recorded log of transitions through the charts"),
    ("conform", _add_conform, "try what users complain about on this router or any other"),
    ("workers", add_workers_commands, "see and change the workers of a running router"),
)
