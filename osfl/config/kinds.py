"""The kinds of payload that a run welcomes, and the settings of a pure run of each.

A run that is not mixed has one kind, its method. A kind of a mixed run names one method, or two
joined by "+", whose payloads are the parts of one message.
"""

from collections.abc import Iterator
from dataclasses import replace

from osfl.config.sections import RunConfig
from osfl.methods import METHODS
from osfl.methods.mixed import MixedConfig
from osfl.util.text import quote

JOINT = "+"
# Each of two parts gets half of a guarantee; a half of a float is exact
MAX_PARTS = 2


def is_mixed(run: RunConfig) -> bool:
    """Return whether clients of a run may send different kinds of payload."""
    return isinstance(run.method_settings, MixedConfig)


def kinds_of(run: RunConfig) -> tuple[str, ...]:
    """Return the kinds of payload that a run welcomes, the preferred one first."""
    kinds: tuple[str, ...] = run.method_settings.kinds if is_mixed(run) else (run.method,)
    return kinds


def methods_of(kind: str) -> tuple[str, ...]:
    """Return the methods of a kind, whose payloads a client sends in one message."""
    return tuple(kind.split(JOINT))


def parts_of(run: RunConfig, kind: str) -> dict[str, RunConfig]:
    """Return the settings of a pure run of each method of a kind, by method.

    The settings are those of a run with `method` set to it, and so are its payloads and images.
    """
    if not is_mixed(run):
        return {run.method: run}
    return {method: _pure(run, method) for method in methods_of(kind)}


def all_parts(run: RunConfig) -> dict[str, RunConfig]:
    """Return the settings of a pure run of every method in a run's kinds, by method."""
    parts: dict[str, RunConfig] = {}
    for kind in kinds_of(run):
        parts.update(parts_of(run, kind))
    return parts


def sends_payloads(run: RunConfig) -> bool:
    """Return whether clients make payloads, of any kind."""
    return any(METHODS[method].client for method in all_parts(run))


def loads_clip(run: RunConfig) -> bool:
    """Return whether the server loads a CLIP: as the global model, or as a mixed run's teacher."""
    name = run.method_settings.teacher if is_mixed(run) else run.method
    return name in METHODS and METHODS[name].zero_shot


def _pure(run: RunConfig, method: str) -> RunConfig:
    # A codec is for numbers that may be rounded
    codec = run.payload_codec if METHODS[method].numbers == "lossy" else "raw"
    return replace(run, method=method, installed_settings=None, payload_codec=codec)


def spelling_problems(run: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the kinds of a mixed run, whose settings are not checked yet.

    The names of the kinds come first: nothing else can be said of unknown ones.
    """
    if problems := list(_name_problems(run)):
        yield from problems
        return
    teacher = run.method_settings.teacher
    setting = f"mixed.teacher = {quote(teacher)}"
    heads = [method for method in all_parts(run) if METHODS[method].features]
    if teacher and teacher not in heads and not loads_clip(run):
        yield (
            f"{setting}: must be a method in mixed.methods that sends statistics of features, as "
            'fedcgs in domain-vector+fedcgs, or "zero-shot", or ""'
        )
    if teacher and run.global_model.mixing != "none":
        yield (
            f"{setting}: requires global-model.mixing = 'none', because a teacher scores whole "
            'images; set one of the two to that or to ""'
        )


def _name_problems(run: RunConfig) -> Iterator[str]:
    kinds = kinds_of(run)
    setting = f"mixed.methods = {quote(','.join(kinds))}"
    if not kinds:
        yield "mixed.methods = '': must name at least one kind of payload, such as feddeo"
    if len(set(kinds)) < len(kinds):
        yield f"{setting}: list each kind once"
    for kind in kinds:
        yield from (f"{setting}: {problem}" for problem in _kind_problems(kind))


def _kind_problems(kind: str) -> Iterator[str]:
    methods = methods_of(kind)
    if unknown := [method for method in methods if method not in METHODS]:
        yield f"{quote(unknown[0])} must be a method; `osfl methods` lists them"
        return
    if len(methods) > MAX_PARTS or len(set(methods)) < len(methods):
        yield f"{quote(kind)} must join at most {MAX_PARTS} different methods"
    first, *additions = methods
    if problem := METHODS[first].mixing_problem:
        yield f"{quote(first)} {problem}"
    for method in additions:
        if problem := METHODS[method].addition_problem:
            yield f"{quote(method)} {problem}"
