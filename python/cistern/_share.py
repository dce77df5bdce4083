"""Tensors sent to other processes by torch.multiprocessing.

The adapter writes and opens the handles that PyTorch's own machinery passes along, in a form of Cistern's own, so both
ends need Cistern. What is sent names the function that rebuilds the tensor; here that is one that says so in one line
where the receiving process has PyTorch's own allocator, instead of whatever that makes of a handle it does not know.
"""

from typing import Any

_WORDS = ("a CUDA tensor was sent by a process whose PyTorch memory is Cistern's, and cannot be opened by one whose is "
          "not: start this process by `cistern run` too, or call cistern.torch.enable() in it before CUDA starts")

# In a process that has no Cistern at all, unpickling still has to say why. Nothing but the standard library is there.
_EXPRESSION = (
    "(lambda found: __import__('cistern._share', fromlist=['rebuild']).rebuild if found else "
    "(_ for _ in ()).throw(RuntimeError(%r)))(__import__('importlib.util', fromlist=['util']).find_spec('cistern'))"
    % _WORDS
)


def rebuild(*arguments: Any) -> Any:
    """PyTorch's rebuild_cuda_tensor, where it can work."""
    from . import torch as ours
    from ._errors import CisternError

    if ours.mode() != "adapter":
        why = ours.why_plain()
        raise CisternError(_WORDS + (" (%s)" % why if why else ""))
    from torch.multiprocessing import reductions

    return reductions.rebuild_cuda_tensor(*arguments)


class _Rebuild:
    """Is pickled as the expression above, and so arrives as rebuild."""

    def __call__(self, *arguments: Any) -> Any:
        return rebuild(*arguments)

    def __reduce__(self) -> Any:
        return eval, (_EXPRESSION,)


def install(torch: Any) -> None:
    """Has tensors on a GPU sent so; everything else is sent as it was."""
    from multiprocessing.reduction import ForkingPickler

    from torch.multiprocessing import reductions

    theirs = reductions.reduce_tensor
    if getattr(theirs, "_cistern", False):
        return

    def reduce_tensor(tensor: Any) -> Any:
        reduced = theirs(tensor)
        if reduced[0] is reductions.rebuild_cuda_tensor:
            return (_Rebuild(),) + tuple(reduced[1:])
        return reduced

    reduce_tensor.__doc__ = theirs.__doc__
    reduce_tensor._cistern = True  # type: ignore[attr-defined]
    reductions.reduce_tensor = reduce_tensor
    registered = getattr(ForkingPickler, "_extra_reducers", {})
    for kind, reducer in list(registered.items()):
        if reducer is theirs:
            ForkingPickler.register(kind, reduce_tensor)
