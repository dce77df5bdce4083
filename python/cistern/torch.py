"""PyTorch on Cistern.

    import cistern.torch
    cistern.torch.enable()

gives PyTorch's memory to Cistern for the rest of the process. PyTorch's allocator can be changed once, and only before
CUDA starts in the process. `enable()` starts neither CUDA nor Cistern: the process may fork until CUDA starts.

There are two ways in. The *adapter* is a C++ class compiled once for the PyTorch that is installed (`cistern.build`):
with it everything under torch.cuda works. Where it is not available, PyTorch's *plain* pluggable allocator is used, by
which allocation, freeing, streams, limits and statistics work, and pools, graph trees, observers and sharing with other
processes do not; one line on standard error says why.
"""

import os
import threading
from typing import TYPE_CHECKING, Any, List, Literal, Optional, Tuple, Union

from . import _built, _cooperate, _injected, _library, _settings, _toolchain
from ._cooperate import cooperate_torch as cooperate
from ._errors import CisternError, SettingsError, say

if TYPE_CHECKING:
    from torch.cuda import MemPool as _TorchMemPool

    from ._pools import External as External
    from ._pools import MemPoolMixin
    from ._pools import PythonAllocator as PythonAllocator
    from .hints import Device, Pool, PoolStats

    class MemPool(MemPoolMixin, _TorchMemPool):  # type: ignore[misc]
        """See MemPoolMixin."""

__all__ = ["External", "MemPool", "PythonAllocator", "cooperate", "enable", "mode", "pool_stats", "why_plain"]

Mode = Literal["adapter", "plain"]

_lock = threading.RLock()
_mode: Optional[Mode] = None
_conf: Optional[str] = None
_functions: Any = None  # the upstream of enable() that is not among the settings
_why_plain = ""
_adapter: Any = None
_started = False  # CUDA, and with it the library


def mode() -> Optional[Mode]:
    """Returns how PyTorch uses Cistern in this process: `"adapter"`, `"plain"`, or None where it does not."""
    return _mode


def why_plain() -> str:
    """Returns the reason for the mode `"plain"`; empty in the other modes."""
    return _why_plain


def enable(conf: Optional[str] = None, *, upstream: "Union[str, External, None]" = None) -> Optional[Mode]:
    """Makes Cistern PyTorch's allocator for the rest of the process. A second call does nothing.

    Args:
        conf: settings, `"key:value,key:value"`; None: those of the environment variable `CISTERN_CONF`. They are written
            there too, so that processes started by this one have the same settings.
        upstream: where all memory comes from except that of pools that name another source: the name of an upstream as for
            `MemPool`, which is the setting `upstream`, or an `External` or a `PythonAllocator`. Functions other than those of
            `External.library` are for this process, on the adapter.

    Returns:
        The `mode()`: `"adapter"`, `"plain"`, or None for a PyTorch without CUDA.

    Raises:
        CisternError: CUDA has started already, or another allocator is in place.
        SettingsError: the settings are wrong.

    Example:
        import cistern.torch

        cistern.torch.enable("limit:70GiB")
    """
    global _mode, _conf, _functions
    import torch  # not under the lock: where `cistern run` follows the import, that enables as well, in whatever thread it is

    with _lock:
        settings = os.environ.get("CISTERN_CONF", "") if conf is None else conf
        if not isinstance(settings, str):
            raise TypeError("conf: expected a string such as %r, got %s" % ("limit:70GiB", type(conf).__name__))
        words, functions = _upstream_of(upstream)
        if words:
            settings = conf = ",".join(s for s in (settings, "upstream:" + words) if s)
        if _mode is not None:
            if functions is not None and functions is not _functions:
                raise CisternError("Cistern is enabled already: the upstream cannot be changed")
            if conf is not None and conf != _conf:
                raise CisternError("Cistern is enabled already, with the settings %r: they cannot be changed to %r" %
                                   (_conf, conf))
            return _mode
        if getattr(torch.version, "cuda", None) is None:
            _injected.say_without_cuda(torch)
            return None
        wanted = _settings.merged(settings)
        _check_settings(wanted)
        _check_untouched(torch)
        if conf is not None:
            os.environ[_settings.VARIABLE] = wanted
        _mode = _install(torch, functions)
        _conf, _functions = settings, functions
        _follow_replacement(torch)
        _library.prepare()
        torch.cuda._lazy_call(_cuda_started)
        return _mode


def _upstream_of(upstream: Any) -> "Tuple[str, Any]":
    """An upstream as the setting has it, else the functions."""
    if upstream is None:
        return "", None
    if not isinstance(upstream, str):
        from ._pools import External

        if not isinstance(upstream, External):
            raise TypeError("upstream: expected the name of an upstream such as \"managed\", or cistern.torch.External, got %s" %
                            type(upstream).__name__)
        if upstream._words is None:
            return "", upstream
        upstream = upstream._words
    if not upstream or "\0" in upstream or ";" in upstream:
        raise ValueError("upstream: expected the name of an upstream such as \"managed\", got %r" % (upstream,))
    return str(upstream).replace(",", ";"), None


def adapter_in_use() -> Any:
    """The adapter; CisternError, with the reason, where PyTorch does not use it."""
    if _mode != "adapter":
        raise CisternError("pools of a kind of memory need PyTorch on Cistern's adapter" +
                           (", which is not in use: " + _why_plain if _why_plain else ": call cistern.torch.enable()"))
    return _adapter


def pool_stats(pool: "Pool", device: "Optional[Device]" = None) -> "PoolStats":
    """Returns a pool's memory on a device.

    Args:
        pool: a `torch.cuda.MemPool`, or the pair of numbers that is its id. `(0, 0)` is the memory outside of pools.
        device: the device; None is the current one.

    Returns:
        A dictionary (`cistern.hints.PoolStats`) with the bytes reserved, requested, allocated, cached, paused and spilled, the
        peak of those reserved, the limit, and the number of blocks.

    Raises:
        CisternError: CUDA has not started on Cistern in this process.

    Example:
        cistern.torch.pool_stats(pool)["peak_reserved"]
    """
    from . import _pools

    found = _pools.numbers(pool)
    if _mode is None or not _library.running():
        raise CisternError("no statistics of pools: CUDA has not started on Cistern in this process")
    return _pools.stats(found, _pools.device_index(device))


def _check_untouched(torch: Any) -> None:
    if torch.cuda.is_initialized():
        raise CisternError("CUDA has started in this process already: call cistern.torch.enable() before anything is "
                           "put on a GPU, or start the program by `cistern run`")
    if getattr(torch.cuda, "_is_in_bad_fork", bool)():
        raise CisternError("this process was forked from one in which CUDA had started: CUDA cannot start here")
    backend = torch.cuda.memory.get_allocator_backend()
    if backend not in ("native", "cudaMallocAsync"):
        raise CisternError("another allocator is in place already (%s): PyTorch's can be changed once" % backend)


def _check_settings(conf: str) -> None:
    """Has the command read the settings as the library will, which must not be loaded yet."""
    if not conf.strip() or os.environ.get("_CISTERN_CONF_CHECKED") == conf:
        return
    import subprocess

    from . import _command

    try:
        done = subprocess.run([_command.path(), "check-conf", conf], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=30)
    except (CisternError, OSError, subprocess.SubprocessError):
        return  # without the command, bad settings are refused when CUDA starts
    if done.returncode == 2:
        words = done.stderr.decode("utf-8", "replace").strip()
        raise SettingsError("CISTERN_CONF: " + (words[len("cistern: "):] if words.startswith("cistern: ") else words))


def _install(torch: Any, upstream: Any) -> Mode:
    global _adapter, _why_plain
    library = _library.path()
    _library.check_machine(library)
    try:
        installed = _toolchain.find_torch()
        _built.check(installed)
        _adapter = load(_built.find(installed) or _build(installed), installed.release)
    except (_toolchain.Missing, OSError) as e:
        if upstream is not None:
            raise CisternError("the upstream's functions need PyTorch on Cistern's adapter, which is not in use: %s" % e) from None
        _why_plain = str(e)
        return _install_plain(torch, library)
    words = _adapter.cistern_torch_install(os.fsencode(library), None)
    if words:
        raise CisternError(words.decode("utf-8", "replace"))
    if upstream is not None:
        from . import _pools

        _pools.everywhere(_adapter, upstream)
    _library.started_by_torch = lambda: bool(_adapter.cistern_torch_started())
    _library.asks_through = _address(_adapter.cistern_torch_asks)
    _cooperate.follow_torch()
    lost = _without_effect(settings_report(_adapter))
    if lost:
        say("settings of PyTorch's that have no effect on Cistern (`cistern doctor` says why): " +
            ", ".join(line.split(": ")[0] for line in lost))
    from . import _share

    _share.install(torch)
    _follow_settings(torch, _adapter)
    return "adapter"


def _address(function: Any) -> int:
    import ctypes

    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _build(installed: _toolchain.Torch) -> str:
    from . import build

    try:
        return build.adapter(installed, build=os.environ.get("CISTERN_BUILD", "1") != "0")
    except build.BuildError as e:
        raise _toolchain.Missing(str(e)) from None


def load(file: str, version: str) -> Any:
    """The adapter, for a PyTorch that is loaded."""
    import ctypes

    try:
        adapter = ctypes.CDLL(file)
    except OSError as e:
        raise OSError("the adapter cannot be loaded: %s" % e) from None
    adapter.cistern_torch_install.restype = ctypes.c_char_p
    adapter.cistern_torch_install.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    adapter.cistern_torch_abi.restype = ctypes.c_char_p
    adapter.cistern_torch_started.restype = ctypes.c_int
    adapter.cistern_torch_start.restype = ctypes.c_char_p
    abi = adapter.cistern_torch_abi().decode()
    # Patches of a release have the interface that it has.
    if abi.split(".")[:2] != version.split(".")[:2]:
        raise OSError("%s is for torch %s, this is torch %s" % (file, abi, version))
    return adapter


def _without_effect(report: str) -> List[str]:
    """Of PyTorch's allocator settings that are given, those that steer nothing here."""
    return [line for line in report.splitlines() if ": no effect" in line or ": unknown to Cistern" in line]


def settings_report(adapter: Any) -> str:
    """What becomes of each of PyTorch's allocator settings that is given, a line each."""
    import ctypes

    adapter.cistern_torch_settings.restype = ctypes.c_char_p
    words: Optional[bytes] = adapter.cistern_torch_settings()
    return words.decode("utf-8", "replace") if words else ""


def _follow_replacement(torch: Any) -> None:
    """A program may put an allocator of its own in place before CUDA starts. It gets it, and one line says so."""
    theirs: Any = getattr(torch._C, "_cuda_changeCurrentAllocator", None)
    if theirs is None:
        return

    def change_current_allocator(allocator: Any) -> None:
        global _mode
        theirs(allocator)
        if _adapter is not None:
            _adapter.cistern_torch_replaced()
        _mode = None
        say("this program puts another allocator in place: PyTorch's memory is not Cistern's", every_rank=True)

    torch._C._cuda_changeCurrentAllocator = change_current_allocator


def _follow_settings(torch: Any, adapter: Any) -> None:
    """Has settings that the program gives PyTorch while it runs looked at too: a line names each that has no effect, once."""
    import ctypes

    theirs: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if theirs is None:
        return
    report = adapter.cistern_torch_settings_of
    report.restype, report.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    known = set()

    def set_allocator_settings(settings: str) -> Any:
        result = theirs(settings)
        for line in _without_effect((report(settings.encode()) or b"").decode("utf-8", "replace")):
            if line not in known:
                known.add(line)
                say("a setting of PyTorch's, " + line)
        return result

    torch._C._accelerator_setAllocatorSettings = set_allocator_settings


def _install_plain(torch: Any, library: str) -> Mode:
    from . import _plain

    _plain.install(torch, library, _why_plain, lambda: _started)
    _library.started_by_torch = lambda: _started
    say("PyTorch uses Cistern through its plain pluggable allocator, without pools, graph trees, observers and sharing "
        "with other processes: " + _why_plain)
    passed_over = [v for v in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
                   if os.environ.get(v)]
    if passed_over:
        say("the plain allocator passes over " + " and ".join(passed_over))
    return "plain"


def _cuda_started() -> None:
    global _started
    _started = True
    from . import _tags

    try:
        _library.load()
        _tags.library_started()
    except CisternError as e:  # of this, PyTorch would make a failure to start CUDA
        say("tags are ignored: %s" % e)


def __getattr__(name: str) -> Any:
    # Loaded when it is first named: enabling imports little.
    if name in ("External", "PythonAllocator"):
        from . import _pools

        return getattr(_pools, name)
    if name == "MemPool":  # derives from PyTorch's, which is imported for it
        import torch

        from ._pools import MemPoolMixin

        made = type("MemPool", (MemPoolMixin, torch.cuda.MemPool), {"__module__": __name__, "__doc__": MemPoolMixin.__doc__})
        globals()["MemPool"] = made
        return made
    raise AttributeError("module %r has no attribute %r" % (__name__, name))
