package analyze

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// Stacks as PyTorch records them, and the class of what they allocate.
func TestReliefClasses(t *testing.T) {
	const site = "/usr/lib/python3/site-packages/"
	call := recording.Frame{File: site + "torch/nn/modules/module.py", Func: "_call_impl"}
	own := recording.Frame{File: "/src/torch/optim_lab/forwarder/train.py", Func: "main"}
	frame := func(file, function string) recording.Frame { return recording.Frame{File: site + file, Func: function} }
	backward := []recording.Frame{frame("torch/autograd/graph.py", "_engine_run_backward"), frame("torch/autograd/__init__.py", "backward"),
		frame("torch/_tensor.py", "backward"), own}
	for _, c := range []struct {
		want   string
		frames []recording.Frame
	}{
		{"optimizer state", []recording.Frame{frame("torch/optim/adam.py", "_init_group"), frame("torch/optim/optimizer.py", "wrapper"), own}},
		{"data loading", []recording.Frame{frame("torch/utils/data/_utils/pin_memory.py", "pin_memory"), own}},
		{"loss and logits", []recording.Frame{frame("torch/nn/functional.py", "cross_entropy"), frame("transformers/loss/loss_utils.py", "ForCausalLMLoss"), call, own}},
		{"loss and logits", []recording.Frame{frame("torch/nn/functional.py", "log_softmax"), call, own}},
		{"key-value cache", []recording.Frame{frame("transformers/cache_utils.py", "update"), frame("transformers/models/gpt2/modeling_gpt2.py", "forward"), call, own}},
		{"weights", []recording.Frame{frame("torch/nn/modules/module.py", "convert"), frame("torch/nn/modules/module.py", "_apply"), own}},
		{"weights", []recording.Frame{frame("torch/nn/modules/linear.py", "__init__"), own}},
		{"activations that are computed again", append([]recording.Frame{frame("torch/nn/functional.py", "gelu"), call,
			frame("torch/utils/checkpoint.py", "recompute_fn"), frame("torch/utils/checkpoint.py", "unpack_hook")}, backward...)},
		{"gradients and temporaries of the backward pass", backward},
		{"activations of the forward pass", []recording.Frame{frame("transformers/activations.py", "forward"), call, own}},
		{"activations of the forward pass", []recording.Frame{frame("torch/nn/functional.py", "layer_norm"), call, own}},
		{"", []recording.Frame{own}}, // folders of the program's own say nothing
		{"", []recording.Frame{{File: "/src/optim/train.py", Func: "step"}}},
	} {
		got := ""
		if i := classOf(c.frames); i >= 0 {
			got = reliefClasses[i].name
		}
		if got != c.want {
			t.Errorf("%v is %q, want %q", c.frames, got, c.want)
		}
	}
	for i, c := range reliefClasses {
		if c.advice == "" || slices.ContainsFunc(reliefClasses[:i], func(o reliefClass) bool { return o.name == c.name }) {
			t.Errorf("class %q has no advice, or is there twice", c.name)
		}
	}
}

// Where no setting helps, what was held is listed by class with exactly its bytes, and the first line names the largest.
func TestRelief(t *testing.T) {
	r := newRecorder()
	r.Frames = []recording.Frame{{File: "torch/optim/adam.py", Func: "_init_group"}, {File: "model.py", Func: "forward"}, {File: "train.py", Func: "main"}}
	r.Stacks = []recording.Stack{nil, {0, 2}, {1, 2}, {2}}
	addr := uint64(1 << 40)
	for stack, sizes := range [][]uint64{{3 * mib}, {20 * mib, 10 * mib}, {40 * mib, 5 * mib, 4 * mib}, {90 * mib}} {
		for _, size := range sizes {
			r.add(event.SegmentAlloc, addr, 100*mib)
			r.add(event.Alloc, addr, size).Stack = uint32(stack)
			addr += 1 << 33
		}
	}
	r.free(1<<40+5<<33, 4*mib) // no longer held
	r.add(event.OOM, mib, 4<<30)
	x := reportOn(t, &r.Trace, RemedyOptions{Budget: time.Nanosecond, Capacity: 4200 * mib}).Failures[0]
	got := ""
	for _, c := range x.Relief {
		got += fmt.Sprintf("%s %d in %d; ", c.Class, c.Bytes/mib, c.Blocks)
	}
	if want := "activations of the forward pass 45 in 2; optimizer state 30 in 2; other allocations 90 in 1; allocations without a stack 3 in 1; "; got != want {
		t.Errorf("%s; want %s", got, want)
	}
	if want := "allocate less, first of the activations of the forward pass (45.00 MiB): a smaller batch"; !strings.Contains(x.Sentence, ". Fix: ") || !strings.Contains(x.Sentence, want) || x.StacksBy != "" {
		t.Errorf("%s; want %s", x.Sentence, want)
	}
	for i := range r.Events {
		r.Events[i].Stack = 0
	}
	x = reportOn(t, &r.Trace, RemedyOptions{Budget: time.Nanosecond, Capacity: 4200 * mib}).Failures[0]
	if want := "cistern record --stacks python -o run.pickle -- PROGRAM"; x.StacksBy != want || !strings.HasSuffix(x.Sentence, ". Fix: allocate less; stacks would name the allocations: "+want) {
		t.Errorf("%q, %s", x.StacksBy, x.Sentence)
	}
}
