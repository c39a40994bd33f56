"""A program to migrate: its syntax tree, the names it imports, and what is decided about each of its places.

A dialect reads the tree and records edits by node; nothing is changed until all dialects have read it. Each use of an
old interface has to be claimed by an edit. One that is not, or that a dialect refuses, leaves the whole file as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import libcst as cst
from libcst.metadata import (
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from polyamp.migration.report import Place

Edit = Callable[[Any], Any]
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
FUNCTIONS = (cst.FunctionDef, cst.Lambda)
Node = TypeVar("Node", bound=cst.CSTNode)


class Use(NamedTuple):
    """A dotted name in a program that an import resolves, such as ``amp.initialize``."""

    node: cst.Name | cst.Attribute
    name: str


class Region(NamedTuple):
    """Statements of one block, from the first to the last, that go into a ``with`` block."""

    first: cst.CSTNode
    last: cst.CSTNode
    header: str


class Program:
    """The tree of one file with positions, scopes and parents, and the edits that the dialects have recorded.

    >>> program = Program(b"from apex import amp as A\\nA.initialize(model)\\n")
    >>> [use.name for use in program.uses(("apex.amp",))]
    ['apex.amp.initialize']
    """

    def __init__(self, source: bytes | cst.Module) -> None:
        self.module = cst.parse_module(source) if isinstance(source, bytes) else source
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        found = wrapper.resolve_many([PositionProvider, ParentNodeProvider, ScopeProvider])
        self.positions: Any = found[PositionProvider]
        self.parents: Any = found[ParentNodeProvider]
        self.scopes: Any = found[ScopeProvider]
        self.edits: dict[cst.CSTNode, Edit] = {}
        self.before: dict[cst.CSTNode, list[str]] = {}
        self.after: dict[cst.CSTNode, list[str]] = {}
        self.regions: list[Region] = []
        self.claimed: set[cst.CSTNode] = set()
        self.refused: list[Place] = []
        self.notes: list[Place] = []
        self.named: list[Place] = []
        self.ambiguous: set[cst.CSTNode] = set()
        self._resolved = list(self._resolve())

    # reading

    def line(self, node: cst.CSTNode) -> int:
        """Return the first line of a node, from 1."""
        return int(self.positions[node].start.line)

    def code(self, node: cst.CSTNode) -> str:
        """Return the source text of a node."""
        return self.module.code_for_node(node).strip()

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node around this one; None for the module."""
        found: cst.CSTNode | None = self.parents.get(node)
        return found

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around this one, the innermost first."""
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def statement(self, node: cst.CSTNode) -> Statement:
        """Return the innermost statement of a block that holds this node, or the node itself if it is one."""
        chain = [node, *self.around(node)]
        found = next(one for one in chain if isinstance(one, Statement))
        assert isinstance(found, Statement)
        return found

    def function(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the innermost function that holds this node, or the module."""
        return next((one for one in self.around(node) if isinstance(one, FUNCTIONS)), self.module)

    def block(self, statement: cst.CSTNode) -> Sequence[cst.CSTNode]:
        """Return the statements of the block that a statement is in."""
        above = self.parent(statement)
        return above.body if isinstance(above, cst.IndentedBlock | cst.Module) else ()

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """Return the scope that a node is in."""
        chain = [node, *self.around(node)]
        return next((found for one in chain if (found := self.scopes.get(one))), None)

    def imported(self) -> list[ImportAssignment]:
        """Return the names that imports bind, in every scope."""
        return [one for scope in self.all_scopes() for one in scope.assignments if isinstance(one, ImportAssignment)]

    def all_scopes(self) -> set[Scope]:
        """Return every scope of the program."""
        return {scope for scope in self.scopes.values() if scope is not None}

    def bindings(self, name: cst.Name) -> list[Any]:
        """Return the assignments that a name may refer to."""
        scope = self.scope(name)
        return list(scope[name.value]) if scope is not None else []

    def uses(self, roots: tuple[str, ...]) -> list[Use]:
        """Return the uses of the modules or functions with these full names, and of what is in them."""
        return [use for use in self._resolved if is_in(use.name, roots)]

    def call(self, use: Use) -> cst.Call | None:
        """Return the call of the used function; None if it is not called here."""
        above = self.parent(use.node)
        return above if isinstance(above, cst.Call) and above.func is use.node else None

    def find(self, kind: type[Node]) -> list[Node]:
        """Return all nodes of a class, in the order of the text."""
        return sorted((node for node in self.parents if isinstance(node, kind)), key=self._place)

    def _place(self, node: cst.CSTNode) -> tuple[int, int]:
        start = self.positions[node].start
        return start.line, start.column

    def _resolve(self) -> Iterator[Use]:
        """Yield every dotted name that begins with the name of an import."""
        imports = self.imported()
        found = {self.whole(access.node) for one in imports for access in one.references}
        for node in sorted(found, key=self._place):
            dotted = dotted_name(node)
            if dotted is not None and isinstance(node, cst.Name | cst.Attribute):
                root, _, rest = dotted.partition(".")
                for full in self._imported(node, root, rest):
                    yield Use(node, full)

    def whole(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the longest dotted name that begins with this node."""
        above = self.parent(node)
        while isinstance(above, cst.Attribute) and above.value is node:
            node, above = above, self.parent(above)
        return node

    def _imported(self, node: cst.CSTNode, root: str, rest: str) -> list[str]:
        """Return the full name of an imported name. Bindings in ``except`` blocks stand for a missing import."""
        scope = self.scope(node)
        found = list(scope[root]) if scope is not None else []
        imports = [one for one in found if isinstance(one, ImportAssignment)]
        others = [one for one in found if not isinstance(one, ImportAssignment) and not self._is_fallback(one)]
        first = [one for one in imports if not self._is_fallback(one)] or imports
        names = sorted({full for one in first for full in self._full_names(one, root, rest)})
        if len(names) > 1 or (names and others):
            self.ambiguous.add(node)
        return names[:1]

    def _is_fallback(self, assignment: Any) -> bool:
        node = getattr(assignment, "node", None)
        return node is not None and any(isinstance(one, cst.ExceptHandler) for one in self.around(node))

    @staticmethod
    def _full_names(assignment: ImportAssignment, root: str, rest: str) -> Iterator[str]:
        for found in assignment.get_qualified_names_for(root):
            yield f"{found.name}.{rest}" if rest else found.name

    # deciding

    def replace(self, node: cst.CSTNode, code: str) -> None:
        """Replace an expression or a statement by other source text; claim it and the uses in it."""
        if isinstance(node, cst.BaseExpression):
            expression = cst.parse_expression(code, self.module.config_for_parsing)
            self.edit(node, lambda _: expression)
        else:
            self.edit(node, lambda updated: self.statements(code, updated))

    def edit(self, node: cst.CSTNode, change: Edit) -> None:
        """Record a change of a node; claim it and the uses in it."""
        self.edits[node] = change
        self.claim(node)

    def remove(self, node: cst.CSTNode) -> None:
        """Remove a statement."""
        self.edit(node, lambda _: cst.RemovalSentinel.REMOVE)

    def claim(self, node: cst.CSTNode) -> None:
        """Record that the uses in a node are converted."""
        self.claimed.update(use.node for use in self._resolved if node in (use.node, *self.around(use.node)))

    def refuse(self, node: cst.CSTNode, what: str, write: str) -> None:
        """Record that a person has to convert this place."""
        self.refused.append(Place(self.line(node), what, write))
        self.claim(node)

    def note(self, node: cst.CSTNode, what: str) -> None:
        """Record that a place is converted and needs a look; the comment goes above its statement."""
        statement = self.statement(node)
        comment = f"# polyamp: {what}"
        if comment not in self.before.setdefault(statement, []):
            self.before[statement].insert(0, comment)
            self.notes.append(Place(self.line(node), what, ""))

    def name(self, node: cst.CSTNode, what: str, page: str) -> None:
        """Record a place that is only named in the report, with the page to read."""
        self.named.append(Place(self.line(node), what, page))

    def statements(self, code: str, original: Any) -> Any:
        """Return parsed statements in place of one, below its comments."""
        parsed = cst.parse_module(code.rstrip("\n") + "\n", self.module.config_for_parsing).body
        return cst.FlattenSentinel([with_comments(parsed[0], original), *parsed[1:]])


def with_comments(statement: Any, original: Any) -> Any:
    """Return a statement with the comments above and beside another."""
    kept: dict[str, Any] = {}
    if hasattr(original, "leading_lines"):
        kept["leading_lines"] = original.leading_lines
    if isinstance(original, cst.SimpleStatementLine) and isinstance(statement, cst.SimpleStatementLine):
        kept["trailing_whitespace"] = original.trailing_whitespace
    return statement.with_changes(**kept)


def is_in(name: str, roots: tuple[str, ...]) -> bool:
    """Return whether a full name is one of these, or in one of these.

    >>> is_in("torch.amp.autocast", ("torch.amp",)), is_in("torch.amplify", ("torch.amp",))
    (True, False)
    """
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def dotted_name(node: cst.CSTNode) -> str | None:
    """Return the text of a name or of attributes of a name; None for any other expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (value := dotted_name(node.value)) is not None:
        return f"{value}.{node.attr.value}"
    return None


def inside(node: cst.CSTNode, *kinds: type[cst.CSTNode]) -> list[Any]:
    """Return the nodes of some classes in a node, itself included, in the order of the text."""
    found: list[Any] = []
    left = [node]
    while left:
        one = left.pop()
        if isinstance(one, kinds):
            found.append(one)
        left += reversed(one.children)
    return found
