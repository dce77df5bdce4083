"""CuPy on Cistern: a stand-in for CuPy over the real library and a simulated device."""

import os
import unittest

from .support import Case, ERROR, HELD

HERE = os.path.dirname(os.path.abspath(__file__))
PATH = os.path.dirname(HERE) + ":" + os.path.join(HERE, "standins")

BEGIN = """
    import gc, os, sys, threading
    import cistern
    import cupy
    from cupy.cuda import runtime
    """ + HELD + ERROR


class Libraries(Case):
    def setUp(self):
        super().setUp()
        self.env = self.environment(PYTHONPATH=PATH, CISTERN_CONF="driver:sim:1GiBx2")

    def program(self, code, begin=BEGIN, check=True, **more):
        import textwrap
        return self.python(textwrap.dedent(begin) + textwrap.dedent(code), env=dict(self.env, **more), check=check)

    def lines(self, code, begin=BEGIN, **more):
        return self.program(code, begin, **more).stdout.splitlines()


class CuPy(Libraries):
    def test_nothing_happens_before_the_first_request(self):
        self.assertEqual(self.lines("""
            cistern.cupy.enable()
            cistern.cupy.enable()
            print(any("libcistern" in line for line in open("/proc/self/maps")), runtime.LOG, flush=True)
            pid = os.fork()  # the child starts a library of its own
            a = cupy.empty(800)
            print(requested(), libraries())
            sys.stdout.flush()
            if pid == 0:
                os._exit(0)
            print(os.waitpid(pid, 0)[1])
            """), ["False []"] + ["800 {'cupy': 800}"] * 2 + ["0"])

    def test_memory_goes_back_when_arrays_go(self):
        self.assertEqual(self.lines("""
            cistern.cupy.enable()
            a, b = cupy.empty(1000), cupy.empty(3 << 20)
            print(requested() == 1000 + (3 << 20), cupy.empty(0).data.ptr)
            where = b.data.ptr
            del b
            print(requested(), cupy.empty(3 << 20).data.ptr == where)
            import array
            class Index(int): pass
            print(cupy.cuda.alloc(Index(512)).mem.size)
            """), ["True 0", "1000 True", "512"])

    def test_streams_and_devices(self):
        # A block that another stream has freed is not reused at once; the stream's own is.
        self.assertEqual(self.lines("""
            cistern.cupy.enable()
            s, t = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
            def where(stream):
                with stream:
                    return cupy.empty(4096).data.ptr
            first = where(s)
            print(where(s) == first, where(t) == first, where(s) == first)
            with cupy.cuda.Device(1):
                a = cupy.empty(77)
            print(a.data.device_id, requested(0), requested(1))
            found = []
            def other():
                found.append(cupy.cuda.get_current_stream().ptr)
                found.append(cupy.empty(64).data.ptr)
            with s:
                thread = threading.Thread(target=other)  # streams are a thread's own
                thread.start(); thread.join()
            print(found[0], found[1] != first)
            """), ["True False True", "1 0 77", "0 True"])

    def test_peers(self):
        # CuPy's kernels use arrays of other devices where devices can.
        self.assertEqual(self.lines("""
            from cistern import _memory
            lib, calls = _memory.library(), []
            theirs = lib.cistern_peer
            lib.cistern_peer = lambda device, peer: calls.append((device, peer)) or theirs(device, peer)
            cistern.cupy.enable()
            a = cupy.empty(100)
            with cupy.cuda.Device(1):
                b, c = cupy.empty(100), cupy.empty(100)
            print(sorted(calls))
            """), ["[(0, 1), (1, 0)]"])

    def test_streams_that_end_before_their_arrays(self):
        # A stream that memory was allocated on is kept for the next of its kind; one of which none was goes as ever.
        self.assertEqual(self.lines("""
            cistern.cupy.enable()
            class External:
                def __cuda_stream__(self): return 0, 0x9990
            a = cupy.empty(512)
            def use(**kind):
                s = cupy.cuda.Stream(**kind)
                with s:
                    return s.ptr, cupy.empty(512)
            first, x = use(non_blocking=True)
            unused = cupy.cuda.Stream()
            del unused
            print(runtime.LOG)
            print(use(non_blocking=True)[0] == first, use()[0] == first, use(non_blocking=True)[0] == first)
            print(use(non_blocking=True, priority=-1)[0] == first)
            del x
            external = cupy.cuda.Stream.from_external(External())
            with external:
                b = cupy.empty(512)
            del b, external
            print(sum(word.startswith("destroy") for word in runtime.LOG))
            """), ["['create 0x1000', 'create 0x1010', 'destroy 0x1010']", "True False True", "False", "1"])

    def test_per_thread_default_stream(self):
        code = """
            cistern.cupy.enable()
            a = cupy.empty(4096)
            where = a.data.ptr
            del a
            with cupy.cuda.Stream.null:
                print(cupy.empty(4096).data.ptr == where)
            found = []
            thread = threading.Thread(target=lambda: found.append(cupy.empty(4096)))
            thread.start(); thread.join()
            print(found[0].data.ptr == where)
            """
        self.assertEqual(self.lines(code), ["True", "True"])
        # CuPy takes its null stream for the per-thread one as well then, which is another in each thread.
        self.assertEqual(self.lines(code, CUPY_CUDA_PER_THREAD_DEFAULT_STREAM="1"), ["True", "False"])

    def test_out_of_memory(self):
        lines = self.lines("""
            cistern.cupy.enable()
            e = error(cupy.empty, 2 << 30)
            print(type(e) is cupy.cuda.memory.OutOfMemoryError, str(e).splitlines()[0])
            class Cycle: pass
            c = Cycle()
            c.me, c.a = c, cupy.empty(900 << 20)
            del c
            gc.disable()
            print(cupy.empty(900 << 20).data.ptr > 0)
            """)
        self.assertTrue(lines[0].startswith("True out of memory on device 0: tried to allocate 2.00 GiB;"), lines)
        self.assertEqual(lines[1], "True")

    def test_default_memory_pool(self):
        lines = self.lines("""
            native = cupy.get_default_memory_pool()
            a = cupy.empty(100)
            del a
            kept = cupy.empty(300)
            cistern.cupy.enable()
            pool = cupy.get_default_memory_pool()
            print(pool is cupy.get_default_memory_pool(), pool.used_bytes(), pool.free_bytes())
            b = cupy.empty(1 << 20)
            print(native.n_free_blocks(), native.used_bytes())  # what was free in CuPy's pool is given back
            print(pool.used_bytes() - (1 << 20), pool.free_bytes() > 0, pool.n_free_blocks() > 0,
                  pool.total_bytes() == pool.used_bytes() + pool.free_bytes())
            del b
            pool.free_all_blocks()
            print(device()["reserved"]["all"]["current"], pool.used_bytes())
            pool.set_limit(size=1 << 20); pool.set_limit(fraction=0.5)
            print(pool.get_limit() == runtime.capacity // 2, type(error(pool.set_limit, 1, 0.5)).__name__,
                  type(error(pool.set_limit, size=-1)).__name__)
            c = pool.malloc(4096)
            print(requested())
            """)
        self.assertEqual(lines, ["True 300 100", "0 300", "300 True True True", "0 300", "True ValueError ValueError", "4096"])
        done = self.program("""
            cistern.cupy.enable()
            for i in range(3):
                cupy.get_default_memory_pool().set_limit(size=1 << 20)
            """)
        self.assertEqual(done.stderr.count("no effect"), 1, done.stderr)

    def test_disable(self):
        self.assertEqual(self.lines("""
            native = cupy.get_default_memory_pool()
            cistern.cupy.disable()
            cistern.cupy.enable()
            a = cupy.empty(512)
            cistern.cupy.disable()
            b = cupy.empty(256)
            print(requested(), native.used_bytes(), cupy.get_default_memory_pool() is native)
            del a
            print(requested())
            cistern.cupy.enable()
            mine = lambda size: native.malloc(size)
            cupy.cuda.set_allocator(mine)
            cistern.cupy.disable()  # the program's own choice stays
            print(cupy.cuda.get_allocator() is mine)
            """), ["512 256 True", "0", "True"])

    def test_for_a_while(self):
        self.assertEqual(self.lines("""
            with cupy.cuda.using_allocator(cistern.cupy.malloc):
                a = cupy.empty(512)
                e = error(cistern.cupy.enable)
                print(type(e).__name__, "using_allocator" in str(e))
            b = cupy.empty(256)
            print(requested(), libraries())
            """), ["CisternError True", "512 {'cupy': 512}"])

    def test_captures(self):
        # What a capture is given comes from a pool whose memory has no other use until the graph is gone.
        self.assertEqual(self.lines("""
            cistern.cupy.enable()
            import pickle
            def pools():
                cistern.snapshot("s.pickle")
                return {s["segment_pool_id"] for s in pickle.load(open("s.pickle", "rb"))["segments"]} - {(0, 0)}
            s = cupy.cuda.Stream(non_blocking=True)
            joined = cupy.cuda.Stream(non_blocking=True)
            with s:
                before = cupy.empty(4096)
                s.begin_capture()
                a = cupy.empty(4096)
                runtime.capturing.add(joined.ptr)
                with joined:
                    b = cupy.empty(4096)
                where = a.data.ptr
                print(len(pools()))
                del a, b
                graph = s.end_capture()
                runtime.capturing.remove(joined.ptr)
                print(cupy.empty(4096).data.ptr != where)
            with joined:
                print(cupy.empty(4096).data.ptr != where)
            print(type(error(s.begin_capture, "bad")).__name__, len(pools()))
            s.begin_capture()
            s.end_capture()
            del graph
            print(len(pools()), requested())
            """), ["1", "True", "True", "RuntimeError 1", "0 4096"])

    def test_child_of_fork(self):
        self.assertEqual(self.lines("""
            cistern.cupy.enable()
            a = cupy.empty(512)
            pid = os.fork()
            if pid == 0:
                e = error(cupy.empty, 512)
                del a
                os._exit(0 if type(e) is cistern.CisternError and "fork" in str(e) else 3)
            print(os.waitpid(pid, 0)[1])
            """), ["0"])

    def test_what_is_missing(self):
        done = self.python("""
            import cistern
            for f in cistern.cupy.enable, cistern.cupy.cooperate, cistern.numba.enable, cistern.rmm.resource, cistern.cuda_core.resource:
                try:
                    f()
                except cistern.CisternError as e:
                    print(str(e).split(",")[0].split(":")[0])
            """, env=dict(self.env, PYTHONPATH=os.path.dirname(HERE)))
        self.assertEqual(done.stdout.splitlines(), ["CuPy is not installed"] * 2 + ["numba is not installed", "RMM is not installed",
                                                                                "cuda.core is not installed"])
        e = self.lines("print(error(cistern.cupy.enable))", CISTERN_LIBRARY="/no/such/lib.so")
        self.assertEqual(e, ["CISTERN_LIBRARY: there is no file /no/such/lib.so"])

    def test_threads(self):
        self.assertEqual(self.lines("""
            cistern.cupy.enable()
            wrong = []
            def work(n):
                try:
                    with cupy.cuda.Stream(non_blocking=True):
                        kept = []
                        for i in range(400):
                            kept.append(cupy.empty(512 * (1 + (i * n) % 40)))
                            if i % 3 == 0:
                                kept = kept[len(kept) // 2:]
                        if len({a.data.ptr for a in kept}) != len(kept):
                            wrong.append("two arrays at one place")
                except BaseException as e:
                    wrong.append(e)
            threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
            for t in threads: t.start()
            for t in threads: t.join()
            print(wrong, requested())
            """), ["[] 0"])


if __name__ == "__main__":
    unittest.main()
