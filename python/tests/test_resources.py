"""Memory for RMM and cuda.core: stand-ins for them over the real library and a simulated device."""

import unittest

from .test_cupy import Libraries

BEGIN = """
    import cistern
    from cistern import _library
    def device(n=0):
        return next(d for d in cistern.stats()["devices"] if d["device"] == n)
    def requested(n=0):
        return device(n)["requested"]["all"]["current"]
    def libraries(n=0):
        return {l["library"]: l["requested"] for l in device(n)["libraries"]}
    def malloc(size, stream):
        return _library.load().cistern_malloc(size, 0, stream)
    def error(f, *a, **k):
        try:
            f(*a, **k)
        except Exception as e:
            return e
        raise AssertionError("no error")
    """


class Rmm(Libraries):
    def lines(self, code, **more):
        return super().lines(code, BEGIN + """
    import rmm
    Stream = rmm.mr.Stream
    """, **more)

    def test_resource(self):
        self.assertEqual(self.lines("""
            r = cistern.rmm.resource(0)
            print(r is cistern.rmm.resource(0), r is cistern.rmm.resource(1), cistern.rmm.resource() is cistern.rmm.resource(1))
            p = r.allocate(1000)
            print(p % 512, requested(), libraries(), r.allocate(0))
            r.deallocate(p, 1000)
            print(requested())
            r.deallocate(0, 0)
            e = error(r.allocate, 1 << 50)
            print(type(e) is cistern.OutOfMemoryError, str(e).splitlines()[0][:32])
            p, q = r.allocate(8), r.allocate(8)
            print(p != q)
            for bad in -1, "0", True:
                print(type(error(cistern.rmm.resource, bad)).__name__)
            """), ["True False True", "0 1000 {'rmm': 1000} 0", "0", "True out of memory on device 0: tried", "True"] + ["ValueError"] * 3)

    def test_order(self):
        # Freed on another stream than it was allocated on, memory is neither's to reuse until the order is known.
        self.assertEqual(self.lines("""
            r, s, t = cistern.rmm.resource(0), Stream(0x1000), Stream(0x2000)
            p = r.allocate(4096, s)
            r.deallocate(p, 4096, s)
            print(r.allocate(4096, s) == p)
            r.deallocate(p, 4096, t)
            print(device()["active"]["all"]["current"] - device()["allocations"]["all"]["current"])
            """), ["True", "1"])

    def test_enable(self):
        self.assertEqual(self.lines("""
            cistern.rmm.enable()
            print(sorted(rmm.mr.per_device))
            p = rmm.mr.per_device[1].allocate(4096)
            print(requested(1))
            """), ["[0, 1]", "4096"])

    def test_the_end(self):
        # Functions of atexit run in reverse order; what is in builtins lives until modules are gone.
        self.assertEqual(self.lines("""
            import atexit, builtins, sys
            before = rmm.mr.get_per_device_resource(0)
            rmm.mr.set_per_device_resource(1, "mine")
            def last():
                print(rmm.mr.per_device[0] is before, rmm.mr.per_device[1])
                q = cistern.rmm.resource(0).allocate(4096)  # it is still there by name
                print(requested())
                cistern.rmm.resource(0).deallocate(q, 4096)
            atexit.register(last)
            cistern.rmm.enable()
            cistern.rmm.enable()
            rmm.mr.set_per_device_resource(1, "mine again")
            r = rmm.mr.per_device[0]
            class Kept:
                def __init__(self, r):
                    self.p, self.r, self.write, self.ending = r.allocate(512), r, sys.stdout.write, sys.is_finalizing
                def __del__(self):
                    self.r.deallocate(self.p, 512)
                    try:
                        self.r.allocate(512)
                    except MemoryError as e:
                        self.write("%s: %s" % (self.ending(), e))
            builtins.kept = Kept(r)
            """), ["True mine again", "4608", "True: Cistern has no memory for RMM any more: the interpreter is ending"])


class CudaCore(Libraries):
    def lines(self, code, **more):
        return super().lines(code, BEGIN + """
    from cuda.core import Device, GraphBuilder, Stream
    """, **more)

    def test_resource(self):
        self.assertEqual(self.lines("""
            import gc
            r = cistern.cuda_core.resource()
            print(r is cistern.cuda_core.resource(0), r is cistern.cuda_core.resource(Device()))
            print(r.is_device_accessible, r.is_host_accessible, r.is_managed, r.device_id)
            s, t = Stream(0x1000), Stream(0x2000)
            b = r.allocate(1000, stream=s)
            print(b.handle % 512, b.size, requested(), libraries())
            p = b.handle
            b.close()
            print(requested(), malloc(1000, 0x1000) == p)
            b = r.allocate(512, stream=s)
            b.streams[0] = t
            b.close()
            print(device()["active"]["all"]["current"] - device()["allocations"]["all"]["current"])
            print(r.allocate(0, stream=s).handle)
            e = error(r.allocate, 1 << 50, stream=s)
            print(type(e) is cistern.OutOfMemoryError, str(e).splitlines()[0][:32])
            before = requested()
            print(error(r.allocate, 13, stream=s), requested() == before)  # the buffer cannot be made
            print(type(error(r.allocate, 512, stream=GraphBuilder(0x3000))).__name__)
            for bad in -1, "0", True:
                print(type(error(cistern.cuda_core.resource, bad)).__name__)
            """), ["True True", "True False False 0", "0 1000 1000 {'cuda.core': 1000}", "0 True", "1", "0",
                   "True out of memory on device 0: tried", "no luck with this size True", "CisternError"] + ["ValueError"] * 3)

    def test_streams_exist_until_their_buffers_are_freed(self):
        # Where buffers do not know their streams, as before cuda.core 1.2.
        self.assertEqual(self.lines("""
            import cuda.core, weakref
            real = cuda.core.Buffer.from_handle
            def old(ptr, size, mr=None, owner=None):
                return real(ptr, size, mr, owner)
            cuda.core.Buffer.from_handle = staticmethod(old)
            r, s, t = cistern.cuda_core.resource(0), Stream(0x1000), Stream(0x2000)
            there = weakref.ref(s)
            b = r.allocate(512, stream=s)
            b.streams[0] = t
            del b.stream, s
            print(there() is not None)
            b.close()
            print(there() is not None)
            """), ["True", "False"])


if __name__ == "__main__":
    unittest.main()
