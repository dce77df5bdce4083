"""A limit on the GPU memory of a test, for pytest. The wheel registers this plugin.

    @pytest.mark.gpu_memory_limit("2GiB")
    def test_step(model, batch):
        model(batch).sum().backward()

The test fails if, on any device, it allocates more than that at its peak, beyond what was allocated when its fixtures were
ready. All libraries on Cistern count. `of="reserved"` measures the reserved bytes in place of the allocated ones; free memory
is returned to the driver before, so that the tests before do not count.

Run the tests by `cistern run -- pytest`, or call `cistern.torch.enable()` (or that of another library) in conftest.py. A test with
a limit is skipped where no library is on Cistern, as on a machine without a GPU: `pytest -rs` shows the reason.

The peaks of `cistern.stats` and `torch.cuda.memory_stats` start again with each such test.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Dict, Generator, List, Optional, Tuple

import pytest

from . import _library

if TYPE_CHECKING:
    from ._attribution import Attribution
    from .hints import DeviceStats

_MARKER = "gpu_memory_limit"
_EVENTS = 100_000  # of the history of a test, for the allocations at its peak
_MOST_STACKS = 3


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", '%s(limit, of="allocated"): fail if the test allocates more GPU memory than limit, such as '
                            '"2GiB"; of="reserved" measures reserved memory. Needs Cistern: cistern run -- pytest' % _MARKER)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    marker = item.get_closest_marker(_MARKER)
    if marker is None:
        yield
        return
    limit, of = _arguments(marker)
    if not _on_cistern():
        pytest.skip("%s: no library is on Cistern: run the tests by `cistern run -- pytest`, or call cistern.torch.enable() in "
                    "conftest.py" % _MARKER)
    before, kept = _begin(of), _keep_stacks()
    try:
        outcome = yield
        words = None if outcome.excinfo else _exceeded(limit, of, before)
    finally:
        kept.remove()
    if words is not None:
        outcome.force_exception(pytest.fail.Exception(words, pytrace=False))


def _arguments(marker: pytest.Mark) -> Tuple[int, str]:
    """The limit in bytes and what is measured. Wrong ones fail the test."""
    try:
        return _checked(*marker.args, **marker.kwargs)
    except (TypeError, ValueError) as e:
        words = str(e)
    pytest.fail("%s: %s" % (_MARKER, words), pytrace=False)


def _checked(limit: Any, of: Any = "allocated") -> Tuple[int, str]:
    from ._pools import size_in_bytes

    if of not in ("allocated", "reserved"):
        raise ValueError("of: expected \"allocated\" or \"reserved\", got %r" % (of,))
    return size_in_bytes(limit, "limit"), of


def _on_cistern() -> bool:
    ours = sys.modules.get("cistern.torch")
    return _library.claimed or _library.running_already() or ours is not None and ours.mode() is not None


def _begin(of: str) -> Dict[int, int]:
    """Starts the peaks again; what is there already, by device."""
    from . import _stats

    gc.collect()  # else what earlier tests left could be freed within this one
    if of == "reserved":
        _library.trim(None)
    before = {}
    for device in _library.stats()["devices"]:
        _stats.reset_peaks(device["device"])
        before[device["device"]] = _of(device, of)["current"]
    return before


def _of(device: "DeviceStats", of: str) -> Any:
    return device["reserved"]["all"] if of == "reserved" else device["allocated"]["all"]


def _keep_stacks() -> "Attribution":
    """Keeps what the program does not keep already: stacks, if this Python has them, and a history."""
    from . import _attribution
    from ._errors import CisternError

    now = _attribution.current()
    history = None if _attribution.has_history() else _EVENTS
    if now.stacks == "off":
        try:
            return _attribution.Attribution("python", "64KiB", history)
        except CisternError:
            pass
    return _attribution.Attribution(now.stacks, now.sample, history)


def _exceeded(limit: int, of: str, before: Dict[int, int]) -> Optional[str]:
    """The line that fails the test; None if it kept to the limit."""
    for device in _library.stats()["devices"]:
        number = device["device"]
        there = before.get(number, 0)
        peak = _of(device, of)["peak"] - there
        if peak > limit:
            words = "%s: device %d peaked at %s %s, over the limit of %s" % (_MARKER, number, _size(peak), of, _size(limit))
            if there:
                words += ", beside %s from before the test" % _size(there)
            largest = _largest(number, device["allocated"]["all"]["peak"])
            return words + ("; largest: " + ", ".join(largest) if largest else "")
    return None


def _largest(device: int, peak: int) -> List[str]:
    """The largest allocations at the peak by stack, as far as the history goes back to it."""
    from . import _attribution, _command
    from ._errors import CisternError

    with tempfile.TemporaryDirectory(prefix="cistern-") as folder:
        file = os.path.join(folder, "test.cistern")
        try:
            _attribution.write(file)
            done = subprocess.run([_command.path(), "inspect", "--json", "--device", str(device), file], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
            found = json.loads(done.stdout)["traces"][0]["peak"]
        except (CisternError, OSError, subprocess.SubprocessError):
            return []  # the limit is exceeded all the same
    if found["allocated_bytes"] != peak:
        return []
    stacks = [s for s in found["by_stack"] if s.get("frames")] or found["by_stack"]  # what was there before the test has none
    return ["%s %s" % (_size(s["bytes"]), s["name"]) for s in stacks[:_MOST_STACKS]]


def _size(n: float) -> str:
    if n < 1024:
        return "%d bytes" % n
    for unit in ("KiB", "MiB", "GiB"):
        n /= 1024
        if n < 1024:
            break
    return "%.2f %s" % (n, unit)
