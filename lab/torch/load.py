"""What loading costs: time and resident memory of libcistern.so and of the adapter once it is built, how long the first
build takes, and what `cistern run` costs a program that never imports torch.

    python load.py
"""
import argparse
import compileall
import ctypes
import json
import os
import sys
import tempfile
import time

import common


def library():
    """Loads libcistern.so in a bare Python and starts it, over the simulated device: what CUDA's own start costs is not
    Cistern's. The first allocation is part of it."""
    path = common.library()
    before = common.resident()
    begin = time.perf_counter()
    lib = ctypes.CDLL(path)
    lib.cistern_malloc.restype = ctypes.c_void_p
    lib.cistern_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    lib.cistern_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    if lib.cistern_init(b"driver:sim:8GiB") != 0:
        raise SystemExit("cistern_init failed")
    p = lib.cistern_malloc(1 << 20, 0, None)
    took = time.perf_counter() - begin
    if not p:
        raise SystemExit("cistern_malloc failed")
    lib.cistern_free(p, 1 << 20, 0, None)
    time.sleep(0.1)  # whatever starts in the background has started
    print(json.dumps({"ms": round(took * 1000, 2), "bytes": common.resident() - before}))


def enable():
    """Registers the adapter, already built, in a Python that has imported torch; CUDA does not start."""
    sys.path.insert(0, common.package_folder())
    import torch  # noqa: F401
    before, begin = common.resident(), time.perf_counter()
    import cistern.torch
    how = cistern.torch.enable()
    took = time.perf_counter() - begin
    after = common.resident()
    print(json.dumps({"ms": round(took * 1000, 2), "bytes": after - before, "mode": how}))


def cuda():
    """Starts CUDA and makes the first tensor."""
    import torch
    begin = time.perf_counter()
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    common.require_cistern()
    print(json.dumps({"ms": round(took * 1000, 2), "resident": common.resident()}))


CHILDREN = {f.__name__: f for f in (library, enable, cuda)}


def several(mode, name, times):
    found = []
    for _ in range(times):
        argv = [sys.executable, os.path.join(common.HERE, "load.py"), "--child", name]
        done = common.run(common.command(mode, argv), env=common.environment(mode), timeout=60)
        r = done.last_json()
        if r is None or done.rc != 0:
            return None, done.why() + done.err[-1500:]
        found.append(r)
    return found, ""


def middle(found, key):
    return common.median([f[key] for f in found])


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--times", type=int, default=5)
    p.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return CHILDREN[args.child]()
    c = common.Checks("load")
    # As pip does when it installs the package.
    compileall.compile_dir(os.path.join(common.package_folder(), "cistern"), quiet=1)

    # The first build, into places that are empty.
    with tempfile.TemporaryDirectory() as d:
        env = {**common.environment("native"), "XDG_CACHE_HOME": d, "TMPDIR": d}
        begin = time.monotonic()
        done = common.run([common.cistern_command(), "build-adapter"], env=env, timeout=180)
        took = time.monotonic() - begin
        c.add("first build of the adapter", f"{took:.1f} s" if done.rc == 0 else done.why(), "said", done.rc == 0)
        if done.rc != 0:
            print(done.out[-2000:], done.err[-4000:])
    common.run([common.cistern_command(), "build-adapter"], env=common.environment("native"), timeout=180)

    total_ms, total_bytes = 0.0, 0
    for name, mode, what in (("library", "native", "libcistern.so, loaded and started"), ("enable", "native", "the adapter, already built")):
        found, why = several(mode, name, args.times)
        if found is None:
            c.add(what, why[:300], "loads", False)
            continue
        print(json.dumps({name: found}))
        total_ms, total_bytes = total_ms + middle(found, "ms"), total_bytes + middle(found, "bytes")
        c.add(f"{what}: time, resident memory", f"{middle(found, 'ms'):.1f} ms, {middle(found, 'bytes') / common.MiB:.1f} MiB"
              + (f" ({found[0]['mode']})" if "mode" in found[0] else ""), "", None)
        if name == "enable":
            c.add("which way in", found[0]["mode"], "adapter", found[0]["mode"] == "adapter")
    c.add("loading in all: time", f"{total_ms:.1f} ms", "at most 10 ms", total_ms <= 10)
    c.add("loading in all: resident memory", f"{total_bytes / 1e6:.1f} MB", "at most 8 MB", total_bytes <= 8e6)

    starts = {}
    for mode in ("native", "cistern"):
        found, why = several(mode, "cuda", 3)
        if found is None:
            c.add(f"the first tensor under {mode}", why[:300], "works", False)
        else:
            starts[mode] = found
    if len(starts) == 2:
        ms, held = ({m: middle(starts[m], k) for m in starts} for k in ("ms", "resident"))
        c.add("CUDA's start and the first tensor", f"{ms['cistern']:.0f} ms, native {ms['native']:.0f} ms")
        c.add("resident memory after that", f"{(held['cistern'] - held['native']) / 1e6:+.1f} MB against native")

    bare = {}
    for mode in ("native", "cistern"):
        runs = [common.run(common.command(mode, [sys.executable, "-c", "pass"]), env=common.environment(mode)) for _ in range(9)]
        bare[mode] = common.median([r.wall for r in runs]) * 1000
    c.add("python -c pass", f"{bare['cistern']:.0f} ms under cistern run, {bare['native']:.0f} ms without", "", None)
    return c.finish()


if __name__ == "__main__":
    sys.exit(main())
