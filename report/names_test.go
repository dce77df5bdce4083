package report

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// nativeName is a name as C++ has them; short is what tables make of it.
const (
	nativeName  = "void at::native::gpu_kernel_impl<at::native::FillFunctor<c10::Half> >(at::TensorIteratorBase&, at::native::FillFunctor<c10::Half> const&)"
	nativeShort = "at::native::gpu_kernel_impl<...> libtorch_cuda.so"
)

// namedTrace is a run of n steps of ten milliseconds, with native frames below those of Python: two layers ask through one function of
// a library, an optimizer makes two kinds of state in one line of the program, and a tool in C++ allocates for itself.
func namedTrace(path string, n int) *recording.Trace {
	const packages = "/opt/venv/lib/python3.12/site-packages/"
	t := &recording.Trace{Path: path, Format: recording.FormatPyTorch, Streams: []uint64{0}, Pools: []recording.PoolID{{}}, FromStart: true,
		Frames: []recording.Frame{
			{Func: nativeName, File: packages + "torch/lib/libtorch_cuda.so"},
			{Func: "Conv1D.forward", File: packages + "transformers/pytorch_utils.py", Line: 119},
			{Func: "Module._call_impl", File: packages + "torch/nn/modules/module.py", Line: 1790},
			{Func: "Attention.forward", File: packages + "transformers/models/gpt2/modeling_gpt2.py", Line: 185},
			{Func: "MLP.forward", File: packages + "transformers/models/gpt2/modeling_gpt2.py", Line: 239},
			{Func: "train", File: "/srv/somebody/experiments/of/this/year/train.py", Line: 30},
			{Func: "_init_group", File: packages + "torch/optim/adam.py", Line: 178},
			{Func: "_init_group", File: packages + "torch/optim/adam.py", Line: 182},
			{Func: "tool::Cache<std::basic_string<char, std::char_traits<char>, std::allocator<char> > >::fill(int)", File: "/srv/somebody/bin/tool"},
		},
		Stacks: []recording.Stack{nil, {0, 1, 2, 3, 2, 5}, {0, 1, 2, 4, 2, 5}, {0, 6, 2, 5}, {0, 7, 2, 5}, {0, 8}}}
	for i := range n {
		t.Events = append(t.Events, event.Event{Kind: event.Alloc, Addr: 0x7f0000000000 + uint64(i)*64*mib, Size: uint64(20+i%5) * mib,
			TimeUS: int64(i) * 10_000, Stack: uint32(1 + i%5)})
	}
	return t
}

// namedPages writes the page of a run of namedTrace and that of the difference of it and a shorter one, and says what they have to show.
func namedPages(t *testing.T, dir string) map[string]any {
	long, short := namedTrace("long.pickle", 100), namedTrace("short.pickle", 50)
	v, _ := viewOf(t, long, []replay.Spec{{Name: "torch", Conf: "default", HasConf: true}}, replay.Options{})
	writePageFile(t, filepath.Join(dir, "names.html"), v)
	dv, err := NewDifferenceView(long, short, analyze.Diff(long, short, false))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := WriteDifferencePage(&b, []*DifferenceView{dv}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "names-differences.html"), b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return map[string]any{"page": filepath.Join(dir, "names.html"), "differences": filepath.Join(dir, "names-differences.html"),
		"frame": nativeShort, "whole": nativeName, "runs": []string{"A: long.pickle, device 0", "B: short.pickle, device 0"},
		"rows": []string{
			"Conv1D.forward transformers/pytorch_utils.py:119, from Attention.forward transformers/models/gpt2/modeling_gpt2.py:185",
			"Conv1D.forward transformers/pytorch_utils.py:119, from MLP.forward transformers/models/gpt2/modeling_gpt2.py:239",
			"tool::Cache<...>::fill .../bin/tool",
			"train .../year/train.py:30, through _init_group torch/optim/adam.py:178",
			"train .../year/train.py:30, through _init_group torch/optim/adam.py:182",
		}}
}
