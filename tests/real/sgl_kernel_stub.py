"""Stands in for SGLang's compiled kernels, of which there is no build for plain CPUs.

SGLang imports names from it all over; on a CPU without AMX it calls none of them, because its
torch-native paths are taken. So every name exists, in every submodule, and calling one is an error.
Installed as the package `sgl_kernel` into SGLang's environment; imports nothing of ours.
"""

import importlib.abc
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

__version__ = "0.4.10"
__path__: list[str] = []


class Absent:
    """A kernel that does not exist here."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{self.__name__}: there is no such kernel on this CPU")

    def __getattr__(self, name: str) -> "Absent":
        return _absent(f"{self.__name__}.{name}", name)


def _absent(path: str, name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(path)
    return Absent(path)


def __getattr__(name: str) -> Absent:
    return _absent(f"{__name__}.{name}", name)


class Submodule(types.ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Absent:
        return _absent(f"{self.__name__}.{name}", name)


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule, empty but for names that are looked up."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Submodules())
