package analyze

import (
	"testing"

	"github.com/cistern-gpu/cistern/trace"
)

func TestLibraryOf(t *testing.T) {
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
		"ext.so":                                                        "ext",
		"train.py":                                                      OwnCode,
		"/srv/job/model/block.py":                                       OwnCode,
		"":                                                              "",
		"??":                                                            "",
	} {
		if got := LibraryOf(trace.Frame{File: file, Func: "f", Line: 1}); got != want {
			t.Errorf("%q is of %q, want %q", file, got, want)
		}
	}
	tr := &trace.Trace{Frames: []trace.Frame{{Func: "torch::empty", File: "??"}, {Func: "f", File: "/x/site-packages/torch/a.py"},
		{Func: "main", File: "train.py"}}, Stacks: []trace.Stack{nil, {0, 1, 2}, {0, 2}, {0}}}
	for stack, want := range []string{UnknownLibrary, "torch", OwnCode, UnknownLibrary, UnknownLibrary} {
		if got := StackLibrary(tr, uint32(stack)); got != want {
			t.Errorf("stack %d is of %q, want %q", stack, got, want)
		}
	}
}
