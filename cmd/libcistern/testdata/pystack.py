"""Holds the frames that pystack.c reads against those that Python itself tells of: pystack.py LIBRARY SEED."""

import asyncio
import collections
import contextlib
import ctypes
import functools
import random
import sys
import threading
import types

library, seed = sys.argv[1], int(sys.argv[2])
MOST = 4096
size = 1 << 21


def loaded(kind):
    lib = kind(library)
    lib.why.restype = ctypes.c_char_p
    lib.walk.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    lib.cost.restype = ctypes.c_double
    return lib


holding, without = loaded(ctypes.PyDLL), loaded(ctypes.CDLL)  # the GIL
found = holding.find()
if found != 0:
    print("refused:", holding.why(found).decode())
    raise SystemExit(0)
if holding.version() != sys.hexversion >> 16:
    raise SystemExit("version %x" % holding.version())

checks = collections.Counter()
lines = set()


def name_of(code):
    return getattr(code, "co_qualname", code.co_name)


def described(f):
    """Frames from f outwards, as Python has them."""
    out = []
    while f is not None:
        c = f.f_code
        out.append((c.co_filename, name_of(c), f.f_lineno or 0, c.co_firstlineno))
        f = f.f_back
    return out


def read(lib, cap=MOST, file_size=8192, skip=1):
    """Frames as pystack.c reads them, without this function's own."""
    buffer = ctypes.create_string_buffer(size)
    n = lib.walk(buffer, size, cap + skip, file_size)
    if n < 0:
        raise SystemExit("no room")
    rows = [r.split("\x1f") for r in buffer.value.decode("utf-8").split("\x1e")[:-1]]
    if len(rows) != n:
        raise SystemExit("%d frames in %d rows" % (n, len(rows)))
    return [(file, func, int(line), int(first)) for file, func, line, first, _ in rows[skip:]]


def check(what="", *_):
    """Compares the frames of its caller; where it stands by itself is compared too, but for the line."""
    for lib in (holding, without):
        want, got = described(sys._getframe()), read(lib)
        if got[0][:2] != want[0][:2] or got[0][3] != want[0][3] or got[1:] != want[1:]:
            for i in range(max(len(want), len(got))):
                a, b = want[i:i + 1], got[i:i + 1]
                if a != b:
                    print("frame %d: Python says %s, read was %s" % (i, a, b))
            raise SystemExit("%s: %d frames; %d were read" % (what, len(want), len(got)))
    checks[what] += 1
    lines.add(want[1][2])
    return 0


def recursive(n):
    return check("recursive") if n == 0 else recursive(n - 1) + 0


def generator(n):
    if n:
        yield from generator(n - 1)
    check("generator")
    yield n


async def coroutine(n):
    if n:
        await coroutine(n - 1)
    await asyncio.sleep(0)
    check("coroutine")


async def gathered():
    async def each(n):
        async with held():
            async for i in counted(n):
                check("async for")

    await asyncio.gather(*[each(i) for i in range(4)])


@contextlib.asynccontextmanager
async def held():
    check("async with")
    yield


async def counted(n):
    for i in range(n):
        await asyncio.sleep(0)
        yield i


def decorated(f):
    @functools.wraps(f)
    def inner(*a, **k):
        check("decorator")
        return f(*a, **k)
    return inner


@decorated
@functools.lru_cache(None)
def inside(a,
           b=2):
    return check("decorated"
                 ) + (lambda x:
                      check("lambda"))(1)


class Class:
    check("class body")

    def __init__(self):
        check("__init__")

    def __lt__(self, other):
        check("__lt__")  # called by C
        return False

    def __del__(self):
        check("__del__")

    @property
    def value(self):
        return check("property")

    class Inner:
        @staticmethod
        def static():
            [check("comprehension") for _ in range(2)]
            {check("set"): 1 for _ in range(2)}
            list(check("generator expression") for _ in range(2))


def exceptions():
    try:
        try:
            raise ValueError
        except ValueError:
            check("except")
            raise KeyError
        finally:
            check("finally")
    except KeyError as e:
        check("second except")
        return e


def callbacks():
    list(map(check, ["map"]))
    sorted([Class(), Class()])
    sorted(range(3), key=lambda x: check("key"))
    functools.partial(functools.reduce, lambda a, b: check("reduce"))([1, 2, 3])
    ctypes.CFUNCTYPE(ctypes.c_int)(lambda: check("from C"))()
    eval("check('eval')", {"check": check})
    exec(compile("\n" * 700 + "def f():\n  check('exec')\nf()", "<made>", "exec"), {"check": check})


def named(text, file):
    """A function whose names are text."""
    def f():
        check("names")
    changed = {"co_name": text, "co_filename": file}
    if hasattr(f.__code__, "co_qualname"):
        changed["co_qualname"] = "outer.<locals>." + text
    types.FunctionType(f.__code__.replace(**changed), {"check": check, "__name__": "x"})()


def names():
    for text in ("plain", "caf\xe9", "\u540d\u524d", "\U0001f40d", "", "x" * 3000, "\u20ac" * 2000):
        named(text, "/folder/" + text + ".py")
    # Where there is no room the end of a file's name stays, and no character is cut.
    def short():
        return read(holding, 1, 12)[0][0]
    for text, want in (("abcdefghijklmnop", "fghijklmnop"), ("\u20ac\u20ac\u20ac\u20acabc", "\u20ac\u20acabc")):
        got = types.FunctionType(short.__code__.replace(co_filename=text), {"read": read, "holding": holding}, "x", (), short.__closure__)()
        if got != want:
            raise SystemExit("%r, want %r" % (got, want))


def made(r):
    """A module of statements that reach over lines, up and down, near and far, with calls anywhere."""
    text, n = [], 0

    def blank():
        for _ in range(r.choice([0, 0, 1, 2, 5, 40, 130, 300])):
            text.append("")

    for i in range(60):
        blank()
        text.append("def f%d(a=0):" % i)
        for _ in range(r.randrange(1, 6)):
            blank()
            kind = r.randrange(9)
            if kind == 0:
                text.extend(["  g(1,", "    check('made'),"] + [""] * r.choice([0, 3, 200]) + ["    check('made'))"])
            elif kind == 1:
                text.extend(["  x = [check('made')", "       for _ in range(2)", "       if check('made') == 0]"])
            elif kind == 2:
                text.extend(["  for _ in (", "      check('made'),):", "    if a == 0 and (", "        check('made') or", "        True):", "      check('made')"])
            elif kind == 3:
                text.extend(["  try:", "    g(check('made'))", "    raise ValueError(", "      check('made'))", "  except ValueError:", "    check('made')", "  finally:", "    check('made')"])
            elif kind == 4:
                text.extend(["  with manager() as m:", "    x = {1: check('made'),", "         2:", "           check('made')}"])
            elif kind == 5:
                text.append("  " + "; ".join(["check('made')"] * r.choice([1, 3, 90])))
            elif kind == 6:
                text.extend(["  x = f'''{check('made')}", "  {", "  check('made')}'''"])
            elif kind == 7:
                text.extend(["  h = lambda: (", "    1,", "    check('made'))", "  h()"])
            else:
                text.extend(["  x = (g(1)", "       .", "       __add__(", "       check('made')))"])
    text.append("for f in [v for k, v in sorted(globals().items()) if k[0] == 'f' and k[1:].isdigit()]:")
    text.append("  f()")

    @contextlib.contextmanager
    def manager():
        yield check("manager")

    exec(compile("\n".join(text), "<made %d>" % r.randrange(1000), "exec"), {"check": check, "g": lambda *a: 0, "manager": manager})


def traced():
    def tracer(frame, event, arg):
        if event == "line" and frame.f_code.co_name == "recursive":
            pass
        return tracer
    sys.settrace(tracer)
    try:
        check("traced")
        recursive(3)
    finally:
        sys.settrace(None)


def threads():
    """Threads that read their own frames while others run Python, with and without the GIL."""
    failed = []

    def work(n):
        try:
            for _ in range(40):
                recursive(n)
                list(generator(3))
                sum(range(1000))
        except SystemExit as e:
            failed.append(e)

    all_of_them = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in all_of_them:
        t.start()
    for t in all_of_them:
        t.join()
    if failed:
        raise failed[0]


def reused():
    """A code object that is made where another one was has another id, and so another line."""
    seen = {}
    buffer = ctypes.create_string_buffer(size)
    for i in range(2000):
        code = compile("walk()", "<cell %d>" % i, "exec")

        def walk():
            holding.walk(buffer, size, 2, 8192)
        exec(code, {"walk": walk})
        row = buffer.value.decode().split("\x1e")[1].split("\x1f")
        if row[0] != "<cell %d>" % i or seen.setdefault(row[4], row[0]) != row[0]:
            raise SystemExit("%s has the id of %s" % (row, seen[row[4]]))
        del code


def remade():
    """The same where nothing but a name of the same length differs, or a line; and where names have no hash yet."""
    seen, places = {}, collections.Counter()
    buffer = ctypes.create_string_buffer(size)

    def walk():
        holding.walk(buffer, size, 2, 8192)
    for i in range(3000):
        text = "def name%04d(walk):\n%s walk()\n%s" % (i // 3, "\n" * (i % 3), " pass\n" * 40)
        code = [c for c in compile(text, "<cell>", "exec").co_consts if hasattr(c, "co_code")][0]
        if i >= 1500:
            code = code.replace(co_name="".join(["made", "%04d" % (i // 3)]))
        places[id(code)] += 1
        types.FunctionType(code, {})(walk)
        row = buffer.value.decode().split("\x1e")[1].split("\x1f")
        want = code.co_name, 2 + i % 3
        if row[1] != name_of(code) or int(row[2]) != want[1] or seen.setdefault(row[4], want) != want:
            raise SystemExit("%s is %s, and has the id of %s" % (row, want, seen.get(row[4])))
        del code
    if max(places.values()) < 2:
        raise SystemExit("no code object was where another had been")


def limits():
    want, got = described(sys._getframe()), read(holding, 1)
    if len(got) != 1 or got[0][1] != want[0][1] or read(holding, 0, skip=0) != []:
        raise SystemExit("cap: %s" % got)


r = random.Random(seed)
recursive(0)
sys.setrecursionlimit(3000)
recursive(900)
list(generator(20))
asyncio.run(coroutine(10))
asyncio.run(gathered())
inside(1)
Class().value
Class.Inner.static()
exceptions()
callbacks()
names()
for _ in range(4):
    made(r)
traced()
threads()
reused()
remade()
limits()
if holding.state() != 0:
    raise SystemExit(holding.why(holding.state()))


def timed(n):
    return (holding.cost(20000, 256), n) if n == 0 else timed(n - 1)


print("checked %d times, %d kinds, %d lines; a walk of 31 frames takes %.0f ns" % (sum(checks.values()), len(checks), len(lines), timed(29)[0]))
