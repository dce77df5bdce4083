"""Tags: labels on what a thread allocates.

The library keeps a stack of tags for each thread. A scope may be entered before the library runs, as in
`with cistern.tag("model"): model.cuda()`, which starts CUDA itself; so the names are kept here too, and given to the
library as soon as there is one.
"""

from __future__ import annotations

from _thread import _local  # type: ignore[attr-defined]  # threading.local, without threading

TYPE_CHECKING = False  # as typing has it, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any, Callable, List, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200


class _Scope:
    __slots__ = ("name", "of", "pushed", "left")

    def __init__(self, name: bytes, of: tag) -> None:
        self.name = name
        self.of = of
        self.pushed = False
        self.left = False


class _Thread(_local):  # type: ignore[misc]
    def __init__(self) -> None:
        self.scopes: List[_Scope] = []


_thread = _Thread()


class tag:
    """Labels the allocations of the calling thread inside a `with` block or a decorated function.

    Tags nest: an allocation has the innermost, or the one entered last where coroutines of a thread take turns. `stats()`,
    snapshots, traces and out-of-memory reports show them.

    Args:
        name: a string of at least one character, without NUL.

    Raises:
        TypeError: the name is no string, or the decorated function is a generator or coroutine; use `with` inside it.
        ValueError: the name is empty or has a NUL.

    Example:
        with cistern.tag("optimizer"):
            optimizer = torch.optim.AdamW(model.parameters())
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError("tag: expected a string, got %s" % type(name).__name__)
        if not name or "\0" in name:
            raise ValueError("tag: expected a string of at least one character without NUL, got %r" % name)
        self.name = name

    def __enter__(self) -> "tag":
        self._last = _Scope(self.name.encode("utf-8", "replace"), self)
        _tidy()
        _thread.scopes.append(self._last)
        _give()
        return self

    def __exit__(self, *exc: object) -> None:
        # Coroutines and generators leave in any order what they entered, and where they are collected in any thread.
        for scope in reversed(_thread.scopes):
            if scope.of is self and not scope.left:
                scope.left = True
                break
        else:
            self._last.left = True
        _tidy()

    def __call__(self, function: F) -> F:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_flags & (_GENERATOR | _COROUTINE | _ASYNC_GENERATOR):
            raise TypeError("a tag belongs to a thread: use `with` inside %s, which is suspended between its steps" %
                            getattr(function, "__qualname__", function))
        import functools

        @functools.wraps(function)
        def tagged(*args: Any, **kwargs: Any) -> Any:
            with tag(self.name):
                return function(*args, **kwargs)

        return tagged  # type: ignore[return-value]

    def __repr__(self) -> str:
        return "cistern.tag(%r)" % self.name


def _tidy() -> None:
    """Drops the scopes that were left. The library knows no order but one within the other."""
    scopes = _thread.scopes
    first = next((i for i, scope in enumerate(scopes) if scope.left), len(scopes))
    if first == len(scopes):
        return
    for scope in reversed(scopes[first:]):
        if scope.pushed:
            from . import _library

            _library.tag_pop()
            scope.pushed = False
    scopes[first:] = [scope for scope in scopes[first:] if not scope.left]
    if len(scopes) > first:
        _give()


def _give() -> None:
    """Gives the scopes that this thread is in to the library, if it runs."""
    try:
        from . import _library
    except OSError:  # no descriptor is left, and the library does not run: it would have imported this
        return

    if not _library.running():
        return
    for scope in _thread.scopes:
        if not scope.pushed:
            scope.pushed = _library.tag_push(scope.name)


def library_started() -> None:
    """Called in the thread that started CUDA."""
    from . import _library

    _library.run_waiting()
    if _thread.scopes:
        _give()
