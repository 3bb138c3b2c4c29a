"""A simulated inference engine: `baton sim`, and the workers of the in-memory fleet.

It answers as vLLM 0.32 or SGLang 0.5.23 do (or as a plain OpenAI-like server), writes with a
deterministic model, and misbehaves on demand in every way a router has to survive. It must
never be kinder than the engines it imitates: what they do badly is what it is for.
"""

from router.sim.engine import SimEngine
from router.sim.faults import Fault, parse_fault
from router.sim.settings import SimSettings

__all__ = ["Fault", "SimEngine", "SimSettings", "parse_fault"]
