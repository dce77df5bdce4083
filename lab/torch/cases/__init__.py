"""The cases of fidelity.py, by subject."""
from . import (graphs, history, limits, oom, pauses, plain, pools, processes, programs, settings, sharing, snapshots, stats,  # noqa: F401
               streams, tensors, upstreams)
from .base import REGISTRY, Skip  # noqa: F401
