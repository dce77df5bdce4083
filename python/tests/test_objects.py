"""Named objects over the real library, a real broker and a simulated device that processes share."""

import json
import os
import struct
import subprocess
import sys
import textwrap
import unittest

from .support import COMMAND, ROOT, Case


@unittest.skipUnless(os.path.exists(COMMAND), "make command makes bin/cistern")
class Objects(Case):
    def setUp(self):
        super().setUp()
        self.run_folder = self.path("run")
        os.makedirs(self.run_folder, exist_ok=True)
        self.socket = os.path.join(self.run_folder, "s")
        if len(self.socket) > 100:
            self.skipTest("the folder for temporary files has too long a path for a socket")
        gpu = "driver:sim:1GiB@%s" % os.path.join(self.run_folder, "gpu")
        self.env = self.environment(PYTHONPATH=os.path.join(ROOT, "python"), CISTERN_CONF="%s,node:%s" % (gpu, self.socket))
        broker = subprocess.Popen([COMMAND, "serve", "--socket", self.socket], stderr=subprocess.PIPE, text=True, env=self.env)
        self.addCleanup(broker.stderr.close)
        self.addCleanup(broker.wait)
        self.addCleanup(broker.terminate)
        self.assertIn("the broker serves", broker.stderr.readline())

    def program(self, code, *arguments):
        return self.python(textwrap.dedent(code), *arguments, env=self.env).stdout.split()

    def start(self, code):
        p = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(p.wait)
        self.addCleanup(p.stdout.close)
        self.addCleanup(p.stdin.close)
        self.addCleanup(p.kill)
        return p

    READ = """
        import ctypes
        from cistern import _memory
        def read(o, name):
            a = o.array(name)
            b = ctypes.create_string_buffer(max(a.nbytes, 1))
            lib = _memory.library()
            assert lib.cistern_node_read(o._mapping.ptr, a.ptr - o._mapping.ptr.value, b, a.nbytes, None) == 0
            return b.raw[:a.nbytes]
        """

    def test_put_and_get(self):
        """An object outlives the process that wrote it, and its readers have what was written."""
        self.program("""
            import array, cistern
            class Host:  # as numpy's arrays are
                def __init__(self):
                    self.a = array.array("f", [1.5, -2.0, 3.0, 0.25, 5.0, 6.0])
                    self.__array_interface__ = dict(shape=(2, 3), typestr="<f4", data=(self.a.buffer_info()[0], False), version=3)
            cistern.node.put("weights/x", {"w": Host(), "raw": b"hello", "none": b""}, labels={"model": "x"}, checksum=True)
            """)
        out = self.program(self.READ + """
        import cistern, struct
        o = cistern.node.get("weights/x")
        print(sorted(o), len(o), o.info["labels"]["model"], o.info["bytes"])
        print(struct.unpack("6f", read(o, "w")), read(o, "raw").decode(), read(o, "none"))
        w = o["w"]
        i = w.__cuda_array_interface__
        print(i["shape"], i["typestr"], i["data"] == (w.ptr, True), w.ptr % 512)
        o.verify()
        print([(d["imported_bytes"], d["reserved"]["all"]["current"]) for d in cistern.stats()["devices"]])
        del o
        print(cistern.node.objects("weights/x")[0]["readers"])  # w has it open
        del w
        print(cistern.node.objects()[0]["readers"])
        with cistern.node.get("weights/x") as o:
            pass
        try:
            o.array("w")
        except cistern.CisternError as e:
            print(str(e).replace(" ", "_"))
        cistern.node.remove("weights/x")
        for f in (lambda: cistern.node.get("weights/x"), lambda: cistern.node.remove("weights/x"), lambda: cistern.node.put("a b", {})):
            try:
                f()
            except cistern.CisternError as e:
                print("error")
        print(cistern.node.objects())
        """)
        text = " ".join(out)
        for want in ("['none', 'raw', 'w'] 3 x 1024", "(1.5, -2.0, 3.0, 0.25, 5.0, 6.0) hello b''", "(2, 3) <f4 True 0", "[(2097152, 0)] 1 0 the_object_is_closed",
                     "error error error []"):
            self.assertIn(want, text)

    def test_torch_sources(self):
        """What is taken of a tensor of PyTorch: its bytes, its type and its shape."""
        out = self.program(self.READ + """
        import array, cistern
        class Tensor:
            dtype, shape, is_cuda = "torch.bfloat16", (3,), False
            def __init__(self): self.a = array.array("H", [1, 2, 3])
            def detach(self): return self
            def contiguous(self): return self
            def data_ptr(self): return self.a.buffer_info()[0]
            def numel(self): return 3
            def element_size(self): return 2
        cistern.node.put("t", {"t": Tensor()})
        o = cistern.node.get("t")
        print(o["t"].dtype, o["t"].shape, read(o, "t") == array.array("H", [1, 2, 3]).tobytes())
        bad = Tensor()
        bad.dtype = "torch.strange"
        try:
            cistern.node.put("t", {"t": bad})
        except TypeError as e:
            print("strange" in str(e))
        """)
        self.assertEqual(" ".join(out), "BF16 (3,) True True")

    def test_safetensors(self):
        """Several processes load a file at once: one object, and its contents; a changed file is another one."""
        path = self.path("model.safetensors")

        def write(text):
            header = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "U8", "shape": [len(text)], "data_offsets": [0, len(text)]}}).encode()
            with open(path, "wb") as f:
                f.write(struct.pack("<Q", len(header) + 8) + header + b" " * 8 + text)

        code = self.READ + """
        import sys, cistern
        o = cistern.node.load_safetensors(sys.argv[1])
        print(read(o, "a").decode(), o.metadata["format"], flush=True)
        sys.stdin.readline()
        """
        write(b"contents")
        many = [self.start(code.replace("sys.argv[1]", repr(path))) for _ in range(4)]
        for p in many:
            self.assertEqual(p.stdout.readline().split(), ["contents", "pt"])
        for p in many:
            p.stdin.close()
            self.assertEqual(p.wait(), 0)
        list_all = "import cistern; print(sum(o['state'] == 'committed' for o in cistern.node.objects()))"
        self.assertEqual(self.program(list_all), ["1"])
        write(b"others")
        p = self.start(code.replace("sys.argv[1]", repr(path)))
        self.assertEqual(p.stdout.readline().split(), ["others", "pt"])
        self.assertEqual(self.program(list_all), ["2"])
        for bad in (b"", b"\0" * 8, struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 3) + b"{x}"):
            with open(path, "wb") as f:
                f.write(bad)
            out = self.program("""
                import sys, cistern
                try:
                    cistern.node.load_safetensors(sys.argv[1])
                except ValueError as e:
                    print("model.safetensors" in str(e))
                """, path)
            self.assertEqual(out, ["True"], bad)
        self.assertEqual(self.program(list_all), ["2"])

    def test_a_writer_that_dies(self):
        """What was not committed is not there."""
        p = self.start("""
            import sys, cistern
            from cistern import _objects
            b = _objects._Build("x", 1 << 20, b"{}", None, 0o600, 0, None)
            print("builds", flush=True)
            sys.stdin.readline()
            """)
        self.assertEqual(p.stdout.readline(), "builds\n")
        states = "import cistern; print([o['state'] for o in cistern.node.objects('x')])"
        self.assertEqual(self.program(states), ["['building']"])
        p.kill()
        p.wait()
        for _ in range(1000):
            if self.program(states) == ["[]"]:
                return
        self.fail("the build stays")
