"""What one run of a script shares with the adapters: the policy, and what the report at its end is made of.

`polyamp run` makes one `Session` and passes it to ``begin(session)`` of each framework that the script imports (see
`polyamp.scripts.imports`). An adapter replaces the deprecated parts of its framework, turns mixed precision on if
`Session.policy` is not None, and reports what it did:

    def begin(session):
        session.replace(torch.cuda.amp, "GradScaler", OurGradScaler)   # undone when the run ends
        if session.policy is not None:
            ...
            session.add(wrapped)                                       # its health is in the report
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from polyamp.errors import UsageError
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.scripts.places import script_line

_MISSING = object()


class Found(NamedTuple):
    """An interface of a script's own mixed precision that was used.

    Attributes:
        interface: its name, as in ``apex.amp.initialize``.
        where: the line of the script, as in ``train.py:12``; empty if a library used it.
    """

    interface: str
    where: str


class Session:
    """One run of a script.

    >>> session = Session()
    >>> session.found("torch.cuda.amp.GradScaler")
    >>> [found.interface for found in session.interfaces]
    ['torch.cuda.amp.GradScaler']

    Attributes:
        policy: the policy of the command line; None without ``--policy``, and then mixed precision is the script's own.
        holders: wrapped optimizers and scalers, or functions that return one.
        interfaces: interfaces of mixed precision that the script used, each place once.
        supplied: names of modules that the script lacks and polyamp supplied.
        plans: what ran in which format, one for each framework.
        notes: sentences for the report.
        shared: what one adapter leaves for another, which cannot import it, by the first one's name.
        sources: the files of the script and of the local modules that it imports.
        begun: the frameworks that were imported, and whose adapters take part.
        has_low: whether something ran in 16 bits, as far as an adapter sees it without a plan.
        last_loss: returns the last loss of the training, or None if there is none.
        refusal: the error that ended the run, if a script cannot be run safely. It stays here if the script caught it.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy
        self.holders: list[Any] = []
        self.interfaces: list[Found] = []
        self.supplied: list[str] = []
        self.plans: list[Plan] = []
        self.notes: list[str] = []
        self.shared: dict[str, Any] = {}
        self.sources: tuple[Path, ...] = ()
        self.begun: list[str] = []
        self.has_low = False
        self.last_loss: Callable[[], float | None] = lambda: None
        self.refusal: UsageError | None = None
        self._undo: list[Callable[[], object]] = []

    @property
    def has_results(self) -> bool:
        """Whether there is something to report of this process."""
        return bool(self.holders or self.plans or self.interfaces or self.refusal)

    def add(self, holder: Any) -> None:
        """Report the health of a wrapped optimizer or scaler at the end.

        Args:
            holder: the object that has the loss scale, or a function without arguments that returns one, or None if
                there is none at the end. What the function refers to must live until then.
        """
        self.holders.append(holder)

    def found(self, interface: str) -> None:
        """Record that the script uses mixed precision of its own.

        Args:
            interface: the interface's name, as in ``apex.amp.initialize``.

        Raises:
            UsageError: the run has a policy: precision would be chosen twice. Call this before anything trains.
        """
        found = Found(interface, script_line())
        if found not in self.interfaces:
            self.interfaces.append(found)
        if self.policy is not None:
            self.refuse(
                "the script has mixed precision of its own",
                found=interface,
                fix="leave out --policy: polyamp run then only supplies what the script lacks; or turn its own off",
            )

    def ran(self, plan: Plan) -> None:
        """Report what ran in which format.

        Args:
            plan: the plan of the first training step.
        """
        self.plans.append(plan)

    def note(self, text: str) -> None:
        """Add a sentence to the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def refuse(self, what: str, *, found: object = None, fix: str | None = None, where: str | None = None) -> NoReturn:
        """End the run: the script cannot be run safely.

        >>> Session().refuse("no optimizer updates the parameters", fix="use torch.optim.SGD", where="train.py:7")
        Traceback (most recent call last):
        polyamp.errors.UsageError: no optimizer updates the parameters
          where:   train.py:7
          to do:   use torch.optim.SGD

        Args:
            what: the reason.
            found: what was seen.
            fix: what to do.
            where: the place; by default the running line of the script.

        Raises:
            UsageError: always.
        """
        self.refusal = UsageError(what, where=where or script_line() or "polyamp run", found=found, fix=fix)
        raise self.refusal

    def check(self) -> None:
        """Raise the refusal again, if the script caught it: nothing may train after it.

        Raises:
            UsageError: the run was refused.
        """
        if self.refusal is not None:
            raise self.refusal

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class until the run ends.

        >>> class Library:
        ...     old = 1
        >>> with running(Session()) as session:
        ...     session.replace(Library, "old", 2)
        ...     Library.old
        2
        >>> Library.old
        1
        """
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def put_back() -> None:
            if before is not _MISSING:
                setattr(owner, name, before)
            else:
                with suppress(AttributeError):
                    delattr(owner, name)

        self.at_end(put_back)

    def at_end(self, undo: Callable[[], object]) -> None:
        """Call a function after the run and its report, in the reverse order of these calls."""
        self._undo.append(undo)

    def close(self) -> None:
        """Undo what was changed for this run."""
        while self._undo:
            self._undo.pop()()


_current: Session | None = None


def current() -> Session | None:
    """Return the session of the script that is running; None outside `polyamp run`.

    >>> current() is None
    True
    """
    return _current


def found(interface: str) -> None:
    """Call `Session.found` of the running script; outside `polyamp run` do nothing. For shims that a script may import.

    >>> found("apex.amp.initialize")
    """
    if _current is not None:
        _current.found(interface)


def start(session: Session | None) -> Session | None:
    """Make a session the current one, and return the one before.

    >>> before = start(Session())
    >>> start(before) is before
    False
    """
    global _current
    before, _current = _current, session
    return before


@contextmanager
def running(session: Session) -> Iterator[Session]:
    """Make a session the current one, and undo what it changed at the end.

    >>> with running(Session()) as session:
    ...     current() is session
    True
    """
    before = start(session)
    try:
        yield session
    finally:
        start(before)
        session.close()
