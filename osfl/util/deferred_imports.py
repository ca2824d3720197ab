"""Deferred execution of library modules that a process imports but rarely uses.

torchvision, transformers and the optimizers of torch import torch's compiler, and diffusers imports
all its transformers for the sake of one: a third to a half of the CPU time in which a client's
process starts. A deferred module runs its code at the first access to a name that it lacks, as with
`importlib.util.LazyLoader`. Unlike there, a submodule may be imported before, and what others
import from it long before they use it has a stand-in.

A name without a stand-in costs time and nothing else, so another version of a library works, too.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import isfunction
from threading import RLock
from types import ModuleType
from typing import Any

# In the namespace of a module whose code has not begun to run
DEFERRING = "__deferring__"
# Names that import itself asks for
PROBED = (DEFERRING, "__path__")


class DeferringLoader(Loader):
    """Loader of a module whose code runs later."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.lock = RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run no code yet."""
        module.__dict__[DEFERRING] = self


class DeferredModule(ModuleType):
    """Module whose code runs at the first access to a name that it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name in PROBED:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        stand_in = STAND_INS[self.__name__].get(name)
        if stand_in is not None and is_deferred(self):
            return stand_in(self, name)
        run_deferred(self)
        return ModuleType.__getattribute__(self, name)


def is_deferred(module: ModuleType) -> bool:
    """Return whether a module's code has yet to run; wait for a thread that runs it."""
    loader = module.__dict__.get(DEFERRING)
    if loader is None:
        return False
    with loader.lock:
        return DEFERRING in module.__dict__


def run_deferred(module: ModuleType) -> None:
    """Run the code of a deferred module once, after the code of its package."""
    loader = module.__dict__.get(DEFERRING)
    if loader is None:
        return
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    if package is not None:
        run_deferred(package)
    with loader.lock:
        if module.__dict__.pop(DEFERRING, None) is None:
            return
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = loader.loader
        try:
            loader.loader.exec_module(module)
        except BaseException:
            module.__dict__[DEFERRING] = loader
            raise
        module.__class__ = ModuleType
    for name, function in MARKED.pop(module.__name__, []):
        getattr(module, name)(function)


# ---- Stand-ins for what a deferred module defines ----


def stand_in_function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a function that runs the module's code at its first call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        run_deferred(module)
        return getattr(module, name)(*args, **kwargs)

    return call


def stand_in_class(module: ModuleType, name: str) -> type:
    """Return a class for `isinstance` and annotations; before the code ran, it has no instance."""

    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return not is_deferred(module) and isinstance(instance, getattr(module, name))

    return Meta(name, (), {"__module__": module.__name__})


# Of each deferred module, its decorators that were used, with the functions
MARKED: dict[str, list[tuple[str, Any]]] = {}


def stand_in_mark(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a decorator that leaves its function as it is; the module's own is applied later."""

    def mark(function: Any) -> Any:
        MARKED.setdefault(module.__name__, []).append((name, function))
        return function

    return mark


def stand_in_disable(compiler: ModuleType, name: str) -> Callable[..., Any]:
    """Return `torch._dynamo.disable`; a function is hidden from the compiler once that has run."""

    def disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        if fn is None:
            return lambda function: disable(function, *args, **kwargs)
        if not isfunction(fn):
            run_deferred(compiler)
            return getattr(compiler, name)(fn, *args, **kwargs)
        hidden: list[Callable[..., Any]] = []

        @wraps(fn)
        def call(*inputs: Any, **options: Any) -> Any:
            if is_deferred(compiler):
                return fn(*inputs, **options)
            if not hidden:
                hidden.append(getattr(compiler, name)(fn, *args, **kwargs))
            return hidden[0](*inputs, **options)

        return call

    return disable


def stand_in_break(compiler: ModuleType, name: str) -> Callable[..., None]:
    """Return `torch._dynamo.graph_break`, which does nothing outside a compiled function."""

    def call(*args: Any, **kwargs: Any) -> None:
        if not is_deferred(compiler):
            getattr(compiler, name)(*args, **kwargs)

    return call


# The deferred modules, and what others import from them without using it at once
STAND_INS: Mapping[str, Mapping[str, Callable[[ModuleType, str], Any]]] = {
    "diffusers.models.transformers": {},
    "scipy.integrate": {},
    "scipy.optimize": {"linear_sum_assignment": stand_in_function},
    "scipy.stats": {},
    "torch._dynamo": {
        "allow_in_graph": stand_in_mark,
        "assume_constant_result": stand_in_mark,
        "disable": stand_in_disable,
        "graph_break": stand_in_break,
    },
    "torch._dynamo.utils": {"is_compile_supported": stand_in_function},
    "torch.nn.attention.flex_attention": {
        "BlockMask": stand_in_class,
        "create_block_mask": stand_in_function,
    },
    "transformers.integrations.flex_attention": {"flex_attention_forward": stand_in_function},
}
# Submodules that work without the code of their deferred package
INDEPENDENT = ("diffusers.models.transformers.", "torch._dynamo._trace_wrapped_higher_order_op")


class DeferringFinder(MetaPathFinder):
    """Finder of the modules in `STAND_INS`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module to defer, and None for any other."""
        if name not in STAND_INS:
            package = sys.modules.get(name.rpartition(".")[0])
            if package is not None and not name.startswith(INDEPENDENT):
                run_deferred(package)
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = DeferringLoader(spec.loader)
        return spec


def defer_imports() -> None:
    """Defer the modules in `STAND_INS` that this process has not imported."""
    if not any(isinstance(finder, DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeferringFinder())
