"""numba on Cistern: a stand-in for numba-cuda over the real library and a simulated device."""

import unittest

from .support import ERROR, HELD
from .test_cupy import Libraries

BEGIN = """
    import os, sys
    import cistern
    from numba import cuda
    from numba.cuda.cudadrv import driver
    """ + HELD + ERROR


class Numba(Libraries):
    def lines(self, code, **more):
        return super().lines(code, BEGIN, **more)

    def test_enable(self):
        code = """
            ENABLE
            a = cuda.device_array(4096)
            print(requested(), libraries(), a.size, a.handle % 512)
            with_size_0 = cuda.device_array(0)
            print(with_size_0.handle)
            b = cuda.device_array(100, device=1)
            print(requested(1))
            del a
            print(requested(), driver.used)
            info = cuda.current_context().get_memory_info()
            print(info.total == 1 << 30, 0 < info.free < info.total)
            """
        want = ["4096 {'numba': 4096} 4096 0", "0", "100", "0 0", "True True"]
        self.assertEqual(self.lines(code.replace("ENABLE", "cistern.numba.enable(); cistern.numba.enable()")), want)
        self.assertEqual(self.lines(code.replace("ENABLE", ""), NUMBA_CUDA_MEMORY_MANAGER="cistern.numba"), want)

    def test_enable_after_use_and_disable(self):
        self.assertEqual(self.lines("""
            a, b = cuda.device_array(100), cuda.device_array(200)
            del b
            cistern.numba.enable()
            print(driver.used, driver.LOG.count("cuMemFree"))  # what was pending is freed
            c = cuda.device_array(4096)
            print(requested())
            del a
            print(driver.used)  # numba's own goes the way it came
            cistern.numba.disable()
            cistern.numba.disable()
            d = cuda.device_array(300)
            print(requested(), driver.used)
            del c
            print(requested())
            """), ["100 1", "4096", "100", "4096 400", "0"])

    def test_out_of_memory(self):
        lines = self.lines("""
            cistern.numba.enable()
            e = error(cuda.device_array, 2 << 30)
            print(type(e).__name__, e.code == 2, e.msg.splitlines()[0])
            """)
        self.assertTrue(lines[0].startswith("CudaAPIError True out of memory on device 0: tried to allocate 2.00 GiB;"), lines)

    def test_streams_that_wait_for_the_legacy_one(self):
        self.assertEqual(self.lines("""
            cistern.numba.enable()
            cuda.external_stream(0x1000)  # blocking
            cuda.external_stream(2)
            cuda.launch(0); cuda.launch(driver.ExperimentalStream(False)); cuda.launch(driver.Stream(0x1008))
            a = cuda.device_array(4096)
            del a
            print(requested(), driver.LOG.count("synchronize"), len(cuda.current_context().memory_manager.deallocations))
            """), ["0 0 0"])

    def test_streams_that_do_not(self):
        for stream in ("cuda.external_stream(0x1008)", "cuda.launch(driver.ExperimentalStream(True))",
                       "driver._stream_handle(driver.ExperimentalStream(True))", "cuda.external_stream('no number')"):
            with self.subTest(stream=stream):
                self.assertEqual(self.lines("""
                    cistern.numba.enable()
                    context = cuda.current_context()
                    a = cuda.device_array(4096)
                    try:
                        %s
                    except TypeError:  # it is not known whether it waits
                        cuda.external_stream(0x1008)
                    del a
                    print(requested(), driver.LOG.count("synchronize"))
                    more = [cuda.device_array(512) for i in range(10)]
                    del more[5:]
                    with context.memory_manager.defer_cleanup():
                        del more
                        print(requested(), driver.LOG.count("synchronize"))
                    cuda.device_array(512)
                    print(requested(), driver.LOG.count("synchronize"))  # eleven pending, one wait
                    late = cuda.device_array(512, device=1)
                    del late
                    print(requested(1), cistern.stats()["devices"][1]["device"])
                    """ % stream), ["4096 0", "9216 0", "0 1", "512 1"])

    def test_while_waiting_is_not_allowed(self):
        # As during a capture: what cannot be waited for stays where it is until it can.
        self.assertEqual(self.lines("""
            cistern.numba.enable()
            manager = cuda.current_context().memory_manager
            cuda.external_stream(0x1008)
            driver.driver.refused = True
            for i in range(20):
                cuda.device_array(512)
            print(requested())
            driver.driver.refused = False
            a = cuda.device_array(600 << 20)
            b = error(cuda.device_array, 600 << 20)
            print(requested() - (600 << 20), driver.LOG.count("synchronize") > 0)
            del a
            a = cuda.device_array(100 << 20)
            del a
            print(requested() >> 20)
            from cistern import _library
            c = _library.load().cistern_malloc(1000 << 20, 0, None)  # another caller: the callback stage has numba give it back
            print(c is not None, requested() >> 20)
            """), ["10240", "0 True", "100", "True 1000"])

    def test_reset(self):
        self.assertEqual(self.lines("""
            cistern.numba.enable()
            a, b = cuda.device_array(4096), cuda.device_array(512)
            cuda.current_context().reset()
            print(requested())
            c = cuda.device_array(256)
            del a, b  # of before: nothing happens
            print(requested())
            """), ["0", "256"])

    def test_ipc(self):
        lines = self.lines("""
            cistern.numba.enable()
            e = error(cuda.current_context().get_ipc_handle, cuda.device_array(4096))
            print(type(e).__name__, e)
            """)
        self.assertEqual(len(lines), 1)
        self.assertIn("CisternError CUDA cannot export this memory to another process ([1] invalid argument): start the program",
                      lines[0])

    def test_exit_with_arrays(self):
        done = self.program("""
            cistern.numba.enable()
            a, b = cuda.device_array(4096), cuda.device_array(512)
            cuda.external_stream(0x1008)
            """, BEGIN)
        self.assertEqual(done.stderr, "")


if __name__ == "__main__":
    unittest.main()
