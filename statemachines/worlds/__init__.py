"""Worlds: small models of what can happen around the charts, for the explorer.

A world is a frozen value. Its steps say what could happen next and ask the real charts for the
verdict, so that a promise is checked for every order of facts on the tables that run.
"""

from statemachines.worlds.breaker import breaker
from statemachines.worlds.fleet import fleet
from statemachines.worlds.handback import handback
from statemachines.worlds.life import life
from statemachines.worlds.pair import pair
from statemachines.worlds.router import router
from statemachines.worlds.wire import Without, wire
from statemachines.worlds.worker import worker

__all__ = ["Without", "breaker", "fleet", "handback", "life", "pair", "router", "wire", "worker"]
