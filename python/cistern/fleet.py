"""A process's place in a job of many, for `cistern fleet`.

    import cistern

    cistern.fleet.describe(dp=3, tp=1, pp=2)
"""

from . import _fleet

__all__ = ["describe"]


def describe(**coordinates: int) -> None:
    """Names the place of this process in the dimensions of its job, such as data, tensor and pipeline parallelism.

    Ranks that differ in `dp` alone are expected to allocate the same. `pp` is the pipeline stage. Other names are kept as they
    are. A later call adds to it. Without a call, the names and coordinates of torch.distributed's device mesh are used where the
    program has one.

    Args:
        coordinates: for each dimension, the coordinate of this process, from 0.

    Raises:
        TypeError: a coordinate is not a number.
        ValueError: a coordinate is negative.

    Example:
        cistern.fleet.describe(dp=3, tp=1, pp=2)
    """
    _fleet.describe(coordinates)
