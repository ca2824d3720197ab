"""Mutants: small changes of the source that a test should detect.

The operators are mutmut's where it has them; the others are classic ones that it lacks (PIT has
them under the names given). mutmut's own runner is not used: it skips decorated functions, such as
all under `torch.no_grad`, and it knows which tests call a function, not which reach a line.

A mutant *computes* if it lies in none of the following.

- A `raise` or `assert`, or an f-string. The condition of a check does compute.
- A call that reports (`QUIET`): logs, warnings, progress, the phase that `osfl status` shows.
- Measurements: stopwatches, costs, the meter of FLOPs.
- The arguments of `ASIDE`: where a tensor is made (no test on a CPU detects it), `zip`'s `strict`
  (an assertion), how a JSON file is indented.
- The recipe of the miniature kits (`RECIPE`), whose numbers are choices that its own training has
to justify.

Annotations, imports, decorators and docstrings are not mutated at all.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

QUIET = frozenset(
    {"log", "warnings", "print", "progress", "advance", "phase", "meter", "watch", "costs", "about"}
)
ASIDE = frozenset({"device", "strict", "indent"})
RECIPE = frozenset(
    {
        "new_vae",
        "new_unet",
        "new_unclip_unet",
        "new_embedding_noise",
        "new_tiny_decoder",
        "new_scheduler",
        "new_text_encoder",
        "new_image_encoder",
        "new_captioner",
        "_train_tokenizer",
        "_merge",
        "pipeline",
        "unclip_pipeline",
    }
)
NEVER = (cst.Annotation, cst.Import, cst.ImportFrom, cst.Decorator)
NODE = cst.CSTNode


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: relative to the project's root.
        function: its qualified name; empty at module level.
        lines: first and last of the expression, and first and last of its statement.
        before, after: the expression's code.
        number: its place among mutants of the same function and code, in the file's order.
        computes: by the rule above.
        source: returns the mutated file's text.
    """

    file: str
    function: str
    lines: tuple[int, int, int, int]
    before: str
    after: str
    number: int
    computes: bool
    source: Callable[[], str]

    @property
    def name(self) -> str:
        """A name that stays while the code of its function does; line numbers may change."""
        return f"{self.file} {self.function}: {self.before} -> {self.after} #{self.number}"

    def rank(self, seed: int) -> str:
        """Return the sort key of a seed; a sample hardly changes when code elsewhere does."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).hexdigest()


def find_mutants(root: Path, file: str) -> list[Mutant]:
    """Return all mutants of a Python file, in its order."""
    wrapper = MetadataWrapper(cst.parse_module((root / file).read_text()))
    finder = _Finder(file, wrapper.module)
    wrapper.visit(finder)
    return finder.found


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: str, module: cst.Module):
        super().__init__()
        self.found: list[Mutant] = []
        self._file = file
        self._module = module
        self._names: list[str] = []
        self._statements: list[tuple[int, int]] = []
        self._quiet = 0
        self._quiet_nodes: set[int] = set()
        self._seen: Counter[str] = Counter()

    def on_visit(self, node: NODE) -> bool:
        if isinstance(node, NEVER):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._names.append(node.name.value)
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statements.append(self._lines(node))
        self._quiet += self._is_quiet(node)
        if m.matches(
            node, m.Call(func=m.Attribute(m.Attribute() | m.Name("meter"), m.Name("run")))
        ):
            # the names of a metered step's shapes
            self._quiet_nodes.add(id(node.args[0]))  # type: ignore[attr-defined]
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for after in operator(node):
                    self._add(node, after)
        return True

    def on_leave(self, node: NODE) -> None:
        if isinstance(node, NEVER):
            return
        self._quiet -= self._is_quiet(node)
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statements.pop()
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._names.pop()

    def _is_quiet(self, node: NODE) -> bool:
        if isinstance(node, cst.Raise | cst.Assert | cst.FormattedString):
            return True
        if isinstance(node, cst.FunctionDef):
            return node.name.value in QUIET | RECIPE
        if isinstance(node, cst.Arg):
            named = node.keyword is not None and node.keyword.value in QUIET | ASIDE
            return named or id(node) in self._quiet_nodes
        if isinstance(node, cst.Call):
            return bool(QUIET - {"meter"} & set(_words(node.func)))
        if isinstance(node, cst.SimpleStatementLine):
            return m.matches(
                node, m.SimpleStatementLine([m.Expr(m.MatchIfTrue(self._is_quiet))])
            ) or (
                m.matches(
                    node,
                    m.SimpleStatementLine(
                        [m.Assign([m.AssignTarget(m.Name(m.MatchIfTrue(QUIET.__contains__)))])]
                    ),
                )
            )
        return False

    def _add(self, node: NODE, after: NODE) -> None:
        changed = " ".join(self._module.code_for_node(after).split())
        before = " ".join(self._module.code_for_node(node).split())
        if changed == before:
            return
        arg_ids = {id(arg) for arg in getattr(after, "args", ())}
        dropped = [arg for arg in getattr(node, "args", ()) if id(arg) not in arg_ids]
        quiet = self._quiet or any(self._is_quiet(arg) for arg in dropped)
        function = ".".join(self._names)
        key = f"{function}: {before} -> {changed}"
        self._seen[key] += 1
        statement = self._statements[-1] if self._statements else self._lines(node)
        self.found.append(
            Mutant(
                self._file,
                function,
                (*self._lines(node), *statement),
                before,
                changed,
                self._seen[key],
                not quiet,
                lambda: self._module.deep_replace(node, after).code,  # type: ignore[union-attr]
            )
        )

    def _lines(self, node: NODE) -> tuple[int, int]:
        place = self.get_metadata(PositionProvider, node, None)
        if place is None:  # an operator without spaces has no place in libcst
            return self._statements[-1] if self._statements else (1, 1)
        # only the head of a compound statement
        if isinstance(node, cst.BaseCompoundStatement):
            body = getattr(node, "body", None)  # a match has cases
            inside = body and self.get_metadata(PositionProvider, body, None)
            return place.start.line, inside.start.line if inside else place.start.line
        return place.start.line, place.end.line


def _words(node: NODE) -> Iterator[str]:
    """Return the parts of a dotted name: job, status, advance."""
    if isinstance(node, cst.Name):
        yield node.value
    elif isinstance(node, cst.Attribute):
        yield from _words(node.value)
        yield node.attr.value


# ---- Operators: node -> replacements ----

# Functions and methods of the same arguments and shape
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
METHODS = {
    **FUNCTIONS,
    "argmin": "argmax",
    "argmax": "argmin",
    "amax": "amin",
    "mean": "sum",
    "sum": "mean",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "sin": "cos",
    "cos": "sin",
    "floor": "ceil",
    "randn": "rand",
    "exp": "expm1",
    "log": "log1p",
}
# Methods of a tensor or module that return one of the same shape
DROPPED = frozenset(
    {"sqrt", "square", "exp", "log", "abs", "neg", "round", "clamp", "clamp_min", "softmax"}
    | {"detach", "clone", "eval", "train", "flatten"}
)
# Swapped arguments change nothing, or only a type checker's result
COMMUTATIVE = frozenset({"min", "max", "cast", "isinstance", "gcd"})


def drop_keyword(node: cst.Call) -> Iterator[NODE]:
    """Drop a keyword argument; mutmut drops every argument or sets it to None, and without a
    positional one most calls fail at once.
    """
    for after in mutators.operator_arg_removal(node):
        arg_ids = {id(arg) for arg in after.args}
        dropped = [arg for arg in node.args if id(arg) not in arg_ids]
        if len(after.args) < len(node.args) and dropped[0].keyword is not None:
            yield after


def exchange_arguments(node: cst.Call) -> Iterator[NODE]:
    """Swap arguments, a part of PIT's argument propagation: f(a, b) becomes f(b, a)."""
    plain = [arg.keyword is None and not arg.star for arg in node.args[:2]]
    name = [*_words(node.func)][-1:]
    if plain == [True, True] and not set(name) & COMMUTATIVE:
        first, second, *tail = node.args
        first, second = (
            first.with_changes(value=second.value),
            second.with_changes(value=first.value),
        )
        yield node.with_changes(args=[first, second, *tail])


def exchange_name(node: cst.Call) -> Iterator[NODE]:
    """Replace a function: min(x) becomes max(x), x.mean() becomes x.sum()."""
    if isinstance(node.func, cst.Attribute) and node.func.attr.value in METHODS:
        yield node.with_deep_changes(node.func.attr, value=METHODS[node.func.attr.value])
    elif isinstance(node.func, cst.Name) and node.func.value in FUNCTIONS:
        yield node.with_deep_changes(node.func, value=FUNCTIONS[node.func.value])


def drop_call(node: cst.Call) -> Iterator[NODE]:
    """Drop a method call, PIT's naked receiver: x.sqrt() becomes x."""
    library = m.Attribute(m.Name("F") | m.Name("torch") | m.Name("np"))
    if not isinstance(node.func, cst.Attribute) or m.matches(node.func, library):
        return
    if node.func.attr.value in DROPPED:
        yield node.func.value


def drop_statement(node: cst.SimpleStatementLine) -> Iterator[NODE]:
    """Drop a statement, PIT's void method call, or an assignment to a part of an object."""
    part = m.AssignTarget(m.Subscript() | m.Attribute())
    dropped = m.Expr(m.Call()) | m.AugAssign() | m.Assign([part]) | m.Del()
    if m.matches(node, m.SimpleStatementLine([dropped])):
        yield node.with_changes(body=[cst.Pass()])


def drop_bound(node: cst.Slice) -> Iterator[NODE]:
    """Drop a bound: x[a:b] becomes x[:b] and x[a:]."""
    for bound in ("lower", "upper"):
        if getattr(node, bound) is not None:
            yield node.with_changes(**{bound: None})


def one_less(node: cst.Integer) -> Iterator[NODE]:
    """Return one less; mutmut has one more."""
    if node.evaluated_value > 0:
        yield node.with_changes(value=str(node.evaluated_value - 1))


OPERATORS: list[tuple[Any, Callable[[Any], Any]]] = [
    (cst.BaseNumber, mutators.operator_number),
    (cst.Integer, one_less),
    (cst.Name, mutators.operator_name),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.Match, mutators.operator_match),
    (cst.IfExp, mutators.operator_if_exp),
    (cst.Call, drop_keyword),
    (cst.Call, exchange_arguments),
    (cst.Call, exchange_name),
    (cst.Call, drop_call),
    (cst.SimpleStatementLine, drop_statement),
    (cst.Slice, drop_bound),
]
