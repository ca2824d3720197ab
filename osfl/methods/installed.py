"""Methods that installed packages declare: entry points of the group `osfl.methods`.

An entry point `name = "package.module"` names a torch-free module with `METHOD = Method(...)`.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from importlib.metadata import EntryPoint, entry_points

from osfl.methods.declaration import Method
from osfl.util.text import quote, sanitize

GROUP = "osfl.methods"
# The name is also that of a section of the run-config
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class DeclarationError(ValueError):
    """A declaration that cannot be used. The message has the reason and a hint."""


def installed_methods(
    built_in: Mapping[str, Method],
) -> tuple[dict[str, Method], dict[str, str]]:
    """Return the methods of installed packages, and the reason for every refused name.

    An error in one package refuses its own method, and no other.
    """
    methods: dict[str, Method] = {}
    refused: dict[str, str] = {}
    for entry in sorted(set(entry_points(group=GROUP)), key=lambda entry: entry.name):
        try:
            if entry.name in methods or entry.name in refused:
                raise DeclarationError("another package declares this name; uninstall one of them")
            methods[entry.name] = _load(entry, built_in)
        except DeclarationError as error:
            methods.pop(entry.name, None)
            refused[entry.name] = (
                f"method = {quote(entry.name)}: refused from the package {_package(entry)} "
                f"({sanitize(entry.value)}): {error}"
            )
    return methods, refused


def _load(entry: EntryPoint, built_in: Mapping[str, Method]) -> Method:
    """Return the method that an entry point declares.

    Raises:
        DeclarationError: its name is taken or invalid, its module cannot be imported, or the
            declaration is incomplete.
    """
    if entry.name in built_in:
        raise DeclarationError("OSFL has this name itself; rename the entry point")
    if not _NAME.fullmatch(entry.name):
        raise DeclarationError("a name must be lower-case words, joined by '-'; rename it")
    try:
        module = importlib.import_module(entry.module)
    # A package may raise anything
    except Exception as error:
        raise DeclarationError(
            f"cannot be imported: {type(error).__name__}: {sanitize(error)}; update or uninstall "
            "the package"
        ) from error
    method = getattr(module, entry.attr or "METHOD", None)
    if not isinstance(method, Method):
        raise DeclarationError("must have METHOD = osfl.methods.Method(...); add it")
    payloads = {row.payload for row in built_in.values()}
    if method.payload not in payloads:
        raise DeclarationError(
            f"payload = {quote(method.payload)}: must be one of "
            f"{', '.join(sorted(filter(None, payloads)))}, which the wire format carries; a new "
            "kind needs a change of OSFL"
        )
    if method.settings is None:
        return method
    _check_settings(method.settings)
    return replace(method, section=entry.name)


def _check_settings(settings: type) -> None:
    """Check that every key of a method's section has a default.

    Raises:
        DeclarationError: a key has none, or the section is not a dataclass.
    """
    if not is_dataclass(settings):
        raise DeclarationError(f"settings = {settings!r}: must be a frozen dataclass")
    for item in fields(settings):
        if not isinstance(item.default, bool | int | float | str):
            problem = "no default" if item.default is MISSING else "an unusable default"
            raise DeclarationError(
                f"{settings.__name__}.{item.name} has {problem}; set it to a number, a text, true "
                "or false"
            )


def _package(entry: EntryPoint) -> str:
    """Return the name and version of the package that has an entry point."""
    if entry.dist is None:
        return "of an unknown name"
    return f"{sanitize(entry.dist.name)} {sanitize(entry.dist.version)}"
