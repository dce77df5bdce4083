"""Allocators that stay separate and ask each other."""

import unittest

from .support import ERROR
from .test_cupy import Libraries

BEGIN = """
    import os, sys, threading, time
    import cistern
    from cistern import _library
    lib = None
    def malloc(size, device=0):
        global lib
        lib = _library.load()
        return lib.cistern_malloc(size, device, None)
    def free(p):
        lib.cistern_free(p, 0, 0, None)
    def held(n=0):
        return sum(d["reserved"]["all"]["current"] for d in cistern.stats()["devices"] if d["device"] == n)
    """ + ERROR


class Callbacks(Libraries):
    def lines(self, code, **more):
        return super().lines(code, BEGIN, **more)

    def test_a_failing_request_asks(self):
        self.assertEqual(self.lines("""
            asked = []
            spare = []
            def give(device, missing):
                asked.append((device, missing))
                if not spare:
                    return False
                free(spare.pop())
                return True
            registration = cistern.on_out_of_memory(give)
            print(any("libcistern" in line for line in open("/proc/self/maps")))  # it waits for the library
            spare.append(malloc(600 << 20))
            print(malloc(600 << 20) is not None, asked)
            print(malloc(600 << 20), len(asked))
            registration.remove()
            registration.remove()
            print(malloc(600 << 20), len(asked))
            """), ["False", "True [(0, 629145600)]", "None 2", "None 2"])

    def test_one_device(self):
        self.assertEqual(self.lines("""
            asked = []
            malloc(512)
            first = cistern.on_out_of_memory(lambda device, missing: asked.append(device), device=1)
            all = cistern.on_out_of_memory(lambda device, missing: asked.append(-1))
            malloc(2 << 30, 0); print(asked)
            malloc(2 << 30, 1); print(asked)
            for bad in -1, "0", True, 1.5:
                print(type(error(cistern.on_out_of_memory, print, bad)).__name__)
            print(type(error(cistern.on_out_of_memory, None)).__name__, type(error(cistern.on_out_of_memory, print, 7)).__name__)
            """), ["[-1]", "[-1, 1, -1]"] + ["ValueError"] * 4 + ["TypeError CisternError"])

    def test_functions_that_fail(self):
        done = self.program("""
            def fails(device, missing):
                raise KeyboardInterrupt("here")
            cistern.on_out_of_memory(fails)
            print(malloc(2 << 30), malloc(2 << 30))
            """, BEGIN)
        self.assertEqual(done.stdout, "None None\n")
        self.assertEqual(done.stderr.count("counts as nothing given: KeyboardInterrupt: here"), 1)
        self.assertEqual(done.stderr.count("Traceback"), 1)

    def test_functions_that_ask_themselves(self):
        # One that allocates is not asked again from within; one that removes itself is not waited for by itself.
        self.assertEqual(self.lines("""
            deep = []
            def greedy(device, missing):
                deep.append(1)
                malloc(2 << 30)
                deep.append(0)
            a = cistern.on_out_of_memory(greedy)
            print(malloc(2 << 30), deep)
            a.remove()
            count = []
            def once(device, missing):
                count.append(1)
                registration.remove()
            registration = cistern.on_out_of_memory(once)
            malloc(2 << 30), malloc(2 << 30)
            print(len(count))
            """), ["None [1, 0]", "1"])

    def test_remove_waits_for_calls(self):
        self.assertEqual(self.lines("""
            entered, leave, done = threading.Event(), threading.Event(), []
            def slow(device, missing):
                entered.set()
                leave.wait()
                done.append("called")
            registration = cistern.on_out_of_memory(slow)
            malloc(512)
            thread = threading.Thread(target=malloc, args=(2 << 30,))
            thread.start()
            entered.wait()
            threading.Timer(0.2, leave.set).start()
            registration.remove()
            print(done)
            thread.join()
            """), ["['called']"])

    def test_exit_while_others_ask(self):
        # Python ends while threads of the library's callers are out of memory all the time.
        for i in range(5):
            done = self.program("""
                malloc(512)
                cistern.on_out_of_memory(lambda device, missing: time.sleep(0.0001))
                def ask():
                    while True:
                        malloc(2 << 30)
                for i in range(4):
                    threading.Thread(target=ask, daemon=True).start()
                time.sleep(0.05)
                """, BEGIN)
            self.assertEqual((done.stdout, done.stderr), ("", ""))

    def test_child_of_fork(self):
        self.assertEqual(self.lines("""
            r = cistern.on_out_of_memory(lambda device, missing: print("asked"))
            malloc(512)
            pid = os.fork()
            if pid == 0:
                r.remove()
                sys.exit(malloc(2 << 30) is not None)
            print(os.waitpid(pid, 0)[1])
            """), ["0"])


class OwnPools(Libraries):
    def lines(self, code, **more):
        return super().lines(code, BEGIN, **more)

    def test_cupy(self):
        self.assertEqual(self.lines("""
            import cupy
            from cupy.cuda import runtime
            runtime.capacity = 1 << 30
            together = cistern.cupy.cooperate()
            print(together is cistern.cupy.cooperate(), "already" in str(error(cistern.cupy.enable)) or "cooperate" in str(error(cistern.cupy.enable)))
            runtime.elsewhere = lambda: held()
            a = cupy.empty(600 << 20)
            del a
            native = cupy.get_default_memory_pool()
            print(native.free_bytes() >> 20)
            cistern.on_out_of_memory(lambda device, missing: print("then", native.free_bytes()))
            malloc(2 << 30)
            print(native.free_bytes(), runtime.LOG)
            # And the other way.
            p = malloc(600 << 20)
            free(p)
            before = held()
            b = cupy.empty(600 << 20)
            print(before >= 600 << 20, held())
            e = error(cupy.empty, 600 << 20)
            print(type(e).__name__)
            together.remove()
            del b
            native.asked = 0
            malloc(2 << 30)
            print(native.asked, cupy.cuda.get_allocator() == native.malloc)
            cistern.cupy.enable()
            print("already" in str(error(cistern.cupy.cooperate)))
            """), ["True True", "600", "then 0", "0 ['free']", "True 0", "OutOfMemoryError", "then 629145600", "0 True", "True"])

    def test_cupy_without_a_pool(self):
        self.assertEqual(self.lines("""
            import cupy
            from cupy.cuda import runtime
            runtime.capacity = 1 << 30
            runtime.elsewhere = lambda: held()
            cupy.cuda.set_allocator(None)
            cistern.cupy.cooperate()
            free(malloc(600 << 20))
            a = cupy.empty(600 << 20)
            print(held(), type(error(cupy.empty, 600 << 20)).__name__)
            """), ["0 CUDARuntimeError"])

    def test_numba(self):
        self.assertEqual(self.lines("""
            from numba import cuda
            from numba.cuda.cudadrv import driver
            driver.capacity = 1 << 30
            together = cistern.numba.cooperate()
            print(together is cistern.numba.cooperate())
            driver.elsewhere = lambda: held()
            a = cuda.device_array(100 << 20)
            del a
            print(driver.used >> 20)  # put off
            malloc(2 << 30)
            print(driver.used)
            with cuda.current_context().memory_manager.defer_cleanup():
                cuda.device_array(100 << 20)
                malloc(2 << 30)
                print(driver.used >> 20)
            free(malloc(700 << 20))
            b = cuda.device_array(700 << 20)
            print(held())
            e = error(cuda.device_array, 700 << 20)
            print(type(e).__name__)
            print("cooperate" in str(error(cistern.numba.enable)))
            together.remove()
            cistern.numba.enable()
            print("already" in str(error(cistern.numba.cooperate)))
            """), ["True", "100", "0", "100", "0", "CudaAPIError", "True", "True"])

    def test_torch(self):
        site = self.fake_torch()
        self.write("site/torch/cuda/more.py", """
            from .. import cuda, note
            cuda.reserved = 600
            cuda.memory_reserved = lambda device: cuda.reserved
            def empty_cache():
                note("emptied")
                cuda.reserved = 0
            cuda.empty_cache = empty_cache
            """)
        self.assertEqual(self.lines("""
            import torch, torch.cuda.more
            together = cistern.torch.cooperate()
            print(together is cistern.torch.cooperate())
            print(torch.LOG, any("libcistern" in line for line in open("/proc/self/maps")))
            torch.cuda.init()
            malloc(2 << 30), malloc(2 << 30)
            print(torch.LOG)
            free(malloc(600 << 20))
            torch._C.observers[0](0, 600 << 20, 1 << 30, 1 << 20)
            print(held())
            together.remove()
            torch.cuda.reserved = 600
            malloc(2 << 30)
            print(torch.cuda.reserved)
            """, PYTHONPATH=self.env["PYTHONPATH"] + ":" + site),
            ["True", "[] False", "['cuda starts', 'emptied']", "0", "600"])


if __name__ == "__main__":
    unittest.main()
