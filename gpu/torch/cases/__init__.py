"""The cases of fidelity.py, by subject."""
from . import graphs, history, oom, plain, pools, processes, programs, settings, sharing, snapshots, stats, streams, tensors  # noqa: F401
from .base import REGISTRY, Skip  # noqa: F401
