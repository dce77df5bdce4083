package recording

import (
	"testing"
)

func TestLibrary(t *testing.T) {
	for file, want := range map[string]string{
		"/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py": "torch",
		"/usr/lib/python3/dist-packages/cupy/cuda/memory.pyx":           "cupy",
		"/opt/venv/lib/python3.12/site-packages/six.py":                 "six",
		`C:\Python312\Lib\site-packages\numba\core\x.py`:                "numba",
		"/usr/lib/python3.12/threading.py":                              "python",
		"/usr/lib64/python3.12/contextlib.py":                           "python",
		"<frozen importlib._bootstrap>":                                 "python",
		"/usr/lib/x86_64-linux-gnu/libcudart.so.13":                     "cudart",
		"/opt/nccl/libnccl.so.2.27.5":                                   "nccl",
		"/usr/lib/x86_64-linux-gnu/libpython3.12.so.1.0":                "python",
		"/usr/bin/python3.12":                                           "python",
		"/opt/conda/bin/python":                                         "python",
		"/usr/bin/pythonic":                                             OwnCode,
		"ext.so":                                                        "ext",
		"train.py":                                                      OwnCode,
		"/srv/job/model/block.py":                                       OwnCode,
		"":                                                              "",
		"??":                                                            "",
	} {
		if got := (Frame{File: file, Func: "f", Line: 1}).Library(); got != want {
			t.Errorf("%q is of %q, want %q", file, got, want)
		}
	}
}

func TestShort(t *testing.T) {
	for want, f := range map[string]Frame{
		"forward transformers/activations.py:66": {Func: "forward", File: "/opt/venv/lib/python3.12/site-packages/transformers/activations.py", Line: 66},
		"f six.py:3":                             {Func: "f", File: "/opt/venv/lib/python3.12/site-packages/six.py", Line: 3},
		"loss.<listcomp> train.py:7":             {Func: "loss.<locals>.<listcomp>", File: "/srv/job/train.py", Line: 7},
		`step train.py:8`:                        {Func: "step", File: `C:\job\train.py`, Line: 8},
		"wait threading.py:9":                    {Func: "wait", File: "/usr/lib/python3.12/threading.py", Line: 9},
		"at::empty(long) in libtorch.so":         {Func: "at::empty(long)", File: "/opt/lib/libtorch.so"},
		"main in train":                          {Func: "main", File: "/srv/job/train"},
		"? train.py:1":                           {File: "train.py", Line: 1},
		"operator new":                           {Func: "operator new", File: "??"},
	} {
		if got := f.Short(); got != want {
			t.Errorf("%+v is %q, want %q", f, got, want)
		}
	}
}

// TestTelling: which frame of a stack is named, and which tells it from others of that function.
func TestTelling(t *testing.T) {
	const site = "/opt/lib/python3.12/site-packages/"
	for name, c := range map[string]struct {
		frames               []Frame
		telling, own, caller int
	}{
		"none": {nil, -1, -1, -1},
		"Python": {[]Frame{{Func: "empty", File: site + "torch/x.py", Line: 1}, {Func: "block", File: "/job/model.py", Line: 2},
			{Func: "main", File: "/job/train.py", Line: 3}}, 1, 1, 2},
		"a library that allocates for itself": {[]Frame{{Func: "empty", File: site + "torch/x.py", Line: 1},
			{Func: "attend", File: site + "transformers/a.py", Line: 2}, {Func: "forward", File: site + "transformers/b.py", Line: 2},
			{Func: "main", File: "/job/train.py", Line: 3}}, 1, 3, 3},
		"libraries in between only": {[]Frame{{Func: "raw_alloc", File: "??"}, {Func: "empty", File: site + "torch/x.py", Line: 1}}, 1, -1, -1},
		"native": {[]Frame{{Func: "cudaMalloc", File: "/usr/lib/libcudart.so.13"}, {Func: "make_pool", File: "/opt/job"}, {Func: "main", File: "/opt/job"},
			{Func: "__libc_start_main", File: "/usr/lib/libc.so.6"}}, 1, 1, 2},
		"native, of Python": {[]Frame{{Func: "alloc", File: "/x/libcuda.so.1"}, {Func: "_PyEval_Frame", File: "/usr/bin/python3.12"},
			{Func: "Py_Run", File: "/usr/lib/libpython3.12.so.1.0"}, {Func: "main", File: "/opt/embeds"}}, 3, 3, -1},
		"without names":  {[]Frame{{Func: "job+0x12", File: "/opt/job"}, {Func: "0x7f0012"}, {Func: "f", File: "/opt/libown.so"}}, 2, -1, -1},
		"C++ of PyTorch": {[]Frame{{Func: "c10::alloc", File: "/src/c10/CUDACachingAllocator.cpp", Line: 9}, {Func: "main", File: "train.py", Line: 1}}, 1, 1, -1},
		"nothing known":  {[]Frame{{}, {File: "??"}}, -1, -1, -1},
	} {
		telling := Telling(c.frames)
		if own, caller := Own(c.frames), Caller(c.frames, telling); telling != c.telling || own != c.own || caller != c.caller {
			t.Errorf("%s: frame %d, of the program %d, caller %d; want %d, %d, %d", name, telling, own, caller, c.telling, c.own, c.caller)
		}
	}
}
