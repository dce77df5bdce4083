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
    __slots__ = ("name", "pushed")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.pushed = False


class _Thread(_local):  # type: ignore[misc]
    def __init__(self) -> None:
        self.scopes: List[_Scope] = []


_thread = _Thread()


class tag:
    """Labels what the calling thread allocates, from entering to leaving a `with` block or a decorated function. Tags
    nest; an allocation bears the innermost. They show in stats(), snapshots and reports of out-of-memory."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError("a tag is a string, got %s" % type(name).__name__)
        if not name or "\0" in name:
            raise ValueError("a tag is a string of at least one character without NUL, got %r" % name)
        self.name = name

    def __enter__(self) -> "tag":
        _thread.scopes.append(_Scope(self.name.encode("utf-8", "replace")))
        _give()
        return self

    def __exit__(self, *exc: object) -> None:
        if _thread.scopes.pop().pushed:
            from . import _library

            _library.tag_pop()

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


def _give() -> None:
    """Gives the scopes that this thread is in to the library, if it runs."""
    from . import _library

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
