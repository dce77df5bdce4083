"""Stacks of Python's functions. Prints ok."""

import ctypes
import sys
import threading

NATIVE, PYTHON = 1, 2

lib = ctypes.CDLL(sys.argv[1])
lib.cistern_malloc.restype = ctypes.c_void_p
lib.cistern_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
lib.cistern_release.argtypes = [ctypes.c_void_p]
lib.cistern_stacks.argtypes = [ctypes.c_uint32, ctypes.c_uint64]


class Use(ctypes.Structure):
    _fields_ = [("stack", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("blocks", ctypes.c_int64),
                ("requested", ctypes.c_uint64), ("allocated", ctypes.c_uint64)]


def held():
    """What is held by stack: {lines: (blocks, bytes)}."""
    uses, n = (Use * 100)(), ctypes.c_size_t()
    assert lib.cistern_stack_usage(0, uses, 100, ctypes.byref(n)) == 0
    out = {}
    for u in uses[:n.value]:
        text = ctypes.create_string_buffer(1 << 16)
        if u.stack:
            assert lib.cistern_stack_text(u.stack, text, len(text)) == 0
        out[tuple(text.value.decode().splitlines())] = (u.blocks, u.allocated)
    return out


def line():
    return sys._getframe(1).f_lineno


def ask(size):
    return lib.cistern_malloc(size, 0, None)


ASK = ask.__code__.co_firstlineno + 1


class Layer:
    def forward(self, size):
        return ask(size)


FORWARD = Layer.forward.__code__.co_firstlineno + 1


def qualified(cls, name):
    return f"{cls}.{name}" if sys.version_info >= (3, 11) else name


def known():
    assert lib.cistern_stacks(PYTHON, 0) == 0
    p = [Layer().forward(1 << 20) for _ in range(1)]; here = line()
    p += [ask(2 << 20), ask(2 << 20)]; there = line()
    found = held()
    assert len(found) == 2, found
    for lines, (blocks, size) in found.items():
        assert lines[0] == f"ask {__file__}:{ASK}", lines
        if size == 1 << 20:
            assert lines[1] == f"{qualified('Layer', 'forward')} {__file__}:{FORWARD}", lines
            assert any(x == f"known {__file__}:{here}" for x in lines), lines
        else:
            assert (blocks, size) == (2, 4 << 20) and lines[1] == f"known {__file__}:{there}", lines
        assert lines[-1].startswith(f"<module> {__file__}:"), lines
    for x in p:
        assert lib.cistern_release(x) == 0
    assert held() == {}


def both():
    """Native frames up to the interpreter, then Python's."""
    assert lib.cistern_stacks(NATIVE | PYTHON, 0) == 0
    p = Layer().forward(1 << 20); here = line()
    (lines, _), = held().items()
    first = lines.index(f"ask {__file__}:{ASK}")
    assert first > 0 and any("ffi" in x for x in lines[:first]), lines
    assert not any("PyEval" in x or "cistern_" in x for x in lines), lines
    assert list(lines[first + 1:first + 3]) == [f"{qualified('Layer', 'forward')} {__file__}:{FORWARD}", f"both {__file__}:{here}"], lines
    assert lib.cistern_release(p) == 0
    assert lib.cistern_stacks(NATIVE, 0) == 0
    p = ask(1 << 20)
    (lines, _), = held().items()
    assert not any(__file__ in x for x in lines), lines
    assert lib.cistern_release(p) == 0


def several():
    """Threads have frames of their own, also while another has the interpreter's lock; code that is gone is remembered."""
    assert lib.cistern_stacks(PYTHON, 0) == 0
    got, go = [], threading.Barrier(5)

    def worker(i):
        space = {"ask": ask}
        exec(compile(f"\n\n\ndef worker_{i}(n):\n    return ask(n)\n", f"<made {i}>", "exec"), space)
        go.wait()
        for k in range(200):
            got.append(space[f"worker_{i}"]((i + 1) << 20))
            assert lib.cistern_release(got.pop()) == 0
        got.append(space[f"worker_{i}"]((i + 1) << 20))

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    go.wait()
    for t in threads:
        t.join()
    found = {size: lines for lines, (_, size) in held().items()}
    assert sorted(found) == [(i + 1) << 20 for i in range(4)], found
    for i in range(4):
        assert found[(i + 1) << 20][1] == f"worker_{i} <made {i}>:5", found
    for p in got:
        assert lib.cistern_release(p) == 0


def made_anew():
    """Functions that come to be where others were are distinguished."""
    assert lib.cistern_stacks(PYTHON, 0) == 0
    kept = []
    for i in range(300):
        space = {"ask": ask}
        exec(compile(f"def made_{i}():\n    return ask(512)\n", f"<{i}>", "exec"), space)
        kept.append(space.pop(f"made_{i}")())
    names = sorted(lines[1] for lines in held() if len(lines) > 1)
    # held asks for a hundred; the table itself has them all.
    assert len(set(names)) == len(names) == 100, names
    for n in names:
        name, place = n.split()
        assert place == f"<{name[5:]}>:2", n
    for p in kept:
        assert lib.cistern_release(p) == 0


for test in known, both, several, made_anew:
    test()
print("ok")
