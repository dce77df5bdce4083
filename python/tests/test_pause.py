"""cistern.pause, resume and pause_buffers over the real library and a simulated device."""

import json
import os
import textwrap

from .support import ROOT, Case

BEGIN = """
    import ctypes, json, os, sys
    import cistern
    from cistern import _library
    MiB = 1 << 20
    lib = _library.load()
    def malloc(n):
        p = lib.cistern_malloc(n, 0, None)
        assert p, _library.last_error(lib)
        return p
    def free(p):
        lib.cistern_free(p, 0, 0, None)
    def device():
        return cistern.stats()["devices"][0]
    def held():
        return device()["reserved"]["all"]["current"]
    def device_free():
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        _library.check(lib, lib.cistern_mem_info(0, ctypes.byref(free), ctypes.byref(total)))
        return free.value
    def fails(f, *a, **k):
        try:
            print("done", f(*a, **k))
        except Exception as e:
            print(type(e).__name__, str(e).splitlines()[0])
"""

BY_TAG = """
    keep = %r
    with cistern.tag("weights"):
        weights = [malloc(64 * MiB) for _ in range(4)]
    rest = malloc(100 * MiB)
    before, free_before = held(), device_free()
    report = cistern.pause(tag="weights", keep=keep)
    print(json.dumps({"report": report, "gone": before - held(), "device": device_free() - free_before,
                      "again": cistern.pause(tag="weights", keep=keep),
                      "requested": device()["requested"]["all"]["current"]}))
    free(weights.pop())  # freed while paused
    back = cistern.resume(cistern.tag("weights"))
    print(json.dumps({"report": back, "again": cistern.resume(), "requested": device()["requested"]["all"]["current"]}))
    """


class Pause(Case):
    def program(self, code, conf="driver:sim:1GiB", **more):
        env = self.environment(PYTHONPATH=os.path.join(ROOT, "python"), CISTERN_CONF=conf)
        return self.python(textwrap.dedent(BEGIN) + textwrap.dedent(code), env=dict(env, **more))

    def test_by_tag(self):
        for keep in ("host", "disk", "drop"):
            done = self.program(BY_TAG % keep)
            paused, resumed = [json.loads(line) for line in done.stdout.splitlines()]
            self.assertEqual(paused["report"]["blocks"], 4)
            self.assertEqual(paused["report"]["bytes"], 256 << 20)
            self.assertGreaterEqual(paused["report"]["physical"] + paused["report"]["shared"], 256 << 20)
            self.assertEqual(paused["gone"], paused["report"]["physical"])
            self.assertEqual(paused["device"], paused["report"]["physical"])
            self.assertEqual(paused["report"]["kept"], 0 if keep == "drop" else 256 << 20)
            self.assertEqual((paused["again"]["blocks"], paused["again"]["physical"]), (0, 0))
            self.assertEqual(paused["requested"], 356 << 20)
            self.assertEqual(resumed["report"]["blocks"], 3)
            self.assertEqual(resumed["report"]["kept"], 0 if keep == "drop" else 192 << 20)
            self.assertEqual((resumed["again"]["blocks"], resumed["again"]["physical"]), (0, 0))
            self.assertEqual(resumed["requested"], 292 << 20)

    def test_by_pool(self):
        done = self.program("""
            pool = (ctypes.c_uint64 * 2)(0, 5)
            assert lib.cistern_pool_create(0, pool, None) == 0
            p = ctypes.c_void_p()
            assert lib.cistern_alloc(ctypes.byref(p), ctypes.c_size_t(64 * MiB), 0, None, pool) == 0
            outside = malloc(64 * MiB)
            print(json.dumps([cistern.pause(pool=(0, 5)), cistern.pause(pool=(0, 0), device="cuda:0"), cistern.resume(pool=[0, 5]),
                              cistern.resume()]))
            fails(cistern.pause, pool=(0, 99))
            """)
        reports = json.loads(done.stdout.splitlines()[0])
        self.assertEqual([r["blocks"] for r in reports], [1, 1, 1, 1])
        self.assertIn("CisternError", done.stdout.splitlines()[1])

    def test_resume_without_memory(self):
        done = self.program("""
            with cistern.tag("a"):
                p = malloc(600 * MiB)
            cistern.pause(tag="a")
            q = malloc(700 * MiB)
            fails(cistern.resume)
            print(isinstance(cistern.OutOfMemoryError("x"), (cistern.CisternError, MemoryError)))
            free(q)
            print(cistern.resume()["blocks"])
            """)
        lines = done.stdout.splitlines()
        self.assertTrue(lines[0].startswith("OutOfMemoryError "), lines[0])
        self.assertEqual(lines[1:], ["True", "1"])

    def test_bad_arguments(self):
        done = self.program("""
            fails(cistern.pause, keep="cloud")
            fails(cistern.pause, dir="/tmp")
            fails(cistern.pause, tag=3)
            fails(cistern.pause, tag="")
            fails(cistern.pause, pool="p")
            fails(cistern.pause, device="cpu")
            fails(cistern.pause_buffers, "much")
            malloc(MiB)
            fails(cistern.pause, device=7)
            fails(cistern.pause, keep="disk", dir="/no/such/folder")
            print(cistern.pause_buffers("64MiB"), cistern.pause_buffers(0))
            """)
        kinds = [line.split()[0] for line in done.stdout.splitlines()]
        self.assertEqual(kinds, ["ValueError", "ValueError", "TypeError", "ValueError", "TypeError", "ValueError", "ValueError",
                                 "CisternError", "CisternError", "None"], done.stdout)

    def test_before_cuda_starts(self):
        site = self.fake_torch()
        done = self.python("""
            import torch, cistern
            for f in (cistern.pause, cistern.resume, lambda: cistern.pause_buffers("1GiB")):
                try:
                    print(f())
                except cistern.CisternError as e:
                    print(e)
            """, env=self.environment(PYTHONPATH=site + ":" + os.path.join(ROOT, "python")))
        self.assertEqual(set(done.stdout.splitlines()), {"nothing to pause or resume: Cistern does not run in this process yet"})

    def test_hundred_cycles_leave_nothing(self):
        done = self.program("""
            with cistern.tag("t"):
                p = [malloc(20 * MiB) for _ in range(5)]
            def now():
                return held(), device_free(), len(os.listdir("/proc/self/fd"))
            for keep in ("host", "disk", "drop"):
                cistern.pause("t", keep=keep), cistern.resume("t")
                before = now()
                for _ in range(100):
                    cistern.pause("t", keep=keep)
                    cistern.resume("t")
                print(now() == before, before, now())
            """)
        for line in done.stdout.splitlines():
            self.assertTrue(line.startswith("True"), line)
