package analyze

import (
	"cmp"
	"path"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/recording"
)

// Where no setting helps, a run has to allocate less. What would change an allocation shows in its stack.

// Relief is what one class of allocations held when a request failed, and what would change it. No more than Bytes can be
// gained.
type Relief struct {
	Class  string `json:"class"`
	Advice string `json:"advice"`
	Bytes  uint64 `json:"bytes"` // requested
	Blocks int    `json:"blocks"`
}

// Classes without advice of their own.
const (
	ClassOther   = "other allocations"
	ClassNoStack = "allocations without a stack"
)

// reliefClass is a class of allocations, known by a frame of their stacks.
type reliefClass struct {
	name, advice string
	// frames are FILE:FUNCTION. FILE is the end of a path, or with a slash at its end a folder in it; FUNCTION is part of a name;
	// either may be missing.
	frames []string
}

// reliefClasses are tried in order, and the first that matches any frame of a stack is its class: a loss is computed within
// modules, and weights are made within them too.
var reliefClasses = []reliefClass{
	{"optimizer state", "an optimizer with less state (8-bit Adam, Adafactor), or state that is sharded (ZeRO, FSDP) or offloaded to the host",
		[]string{"torch/optim/", "bitsandbytes/optim/", "apex/optimizers/", "deepspeed/ops/adam/", "deepspeed/runtime/zero/", "transformers/optimization.py",
			":_init_group"}},
	{"data loading", "a smaller batch, or fewer batches copied ahead (prefetching)", []string{"torch/utils/data/", ":collate", ":prefetch", ":DataLoader"}},
	{"loss and logits", "a loss that is computed in chunks of the sequence, or fused with the last layer, so that the logits of all tokens never exist at once",
		[]string{":cross_entropy", ":log_softmax", ":nll_loss", "torch/nn/modules/loss.py", "transformers/loss/"}},
	{"key-value cache", "a smaller batch or a shorter context, a quantized or offloaded cache, none in training (use_cache=False)",
		[]string{"cache_utils.py", ":kv_cache", "vllm/worker/cache_engine.py"}},
	{"weights", "a smaller type (bfloat16, quantized), or weights that are sharded (FSDP, tensor parallelism) or offloaded",
		[]string{"torch/nn/modules/module.py:convert", "torch/nn/modules/module.py:_apply", "torch/nn/modules/linear.py:__init__",
			"torch/nn/modules/sparse.py:__init__", ":reset_parameters", ":load_state_dict", ":from_pretrained", "safetensors/", "torch/serialization.py"}},
	{"activations that are computed again", "a smaller batch or shorter sequences, or checkpoints closer together",
		[]string{"torch/utils/checkpoint.py:recompute", "torch/utils/checkpoint.py:unpack_hook"}},
	{"gradients and temporaries of the backward pass", "optimizer.zero_grad(set_to_none=True) before the forward pass, sharded gradients (ZeRO, FSDP), or a smaller batch",
		[]string{"torch/_tensor.py:backward", "torch/autograd/__init__.py:backward", "torch/autograd/graph.py:_engine_run_backward"}},
	{"activations of the forward pass", "a smaller batch or shorter sequences, or activation checkpointing (torch.utils.checkpoint)",
		[]string{":forward", "torch/nn/functional.py", "torch/nn/modules/"}},
}

// matches reports whether a frame is one of a class. Only the names of files and functions count, never the folder of the
// program's own that they lie in.
func (c *reliefClass) matches(f *recording.Frame) bool {
	return slices.ContainsFunc(c.frames, func(pattern string) bool {
		file, function, _ := strings.Cut(pattern, ":")
		if function != "" && !strings.Contains(f.Func, function) {
			return false
		}
		name := "/" + strings.TrimPrefix(f.File, "/")
		if strings.HasSuffix(file, "/") {
			return strings.Contains(name, "/"+file)
		}
		if !strings.Contains(file, "/") {
			return file == "" || path.Base(name) == file
		}
		return strings.HasSuffix(name, "/"+file)
	})
}

// classOf is the place of a stack's class in reliefClasses, -1 where none matches.
func classOf(frames []recording.Frame) int {
	return slices.IndexFunc(reliefClasses, func(c reliefClass) bool {
		return slices.ContainsFunc(frames, func(f recording.Frame) bool { return c.matches(&f) })
	})
}

// reliefs are the classes of the allocations in a state, the most bytes first; what has no class comes last, and so does what
// has no stack.
func reliefs(t *recording.Trace, s *state) []Relief {
	const other, noStack = -1, -2
	byStack, byClass := map[uint32]int{}, map[int]*Relief{}
	for _, b := range s.live {
		class, known := byStack[b.stack]
		if !known {
			frames := t.FramesOf(b.stack)
			if class = classOf(frames); len(frames) == 0 {
				class = noStack
			}
			byStack[b.stack] = class
		}
		r := byClass[class]
		if r == nil {
			switch r = (&Relief{}); class {
			case other:
				r.Class = ClassOther
			case noStack:
				r.Class = ClassNoStack
			default:
				r.Class, r.Advice = reliefClasses[class].name, reliefClasses[class].advice
			}
			byClass[class] = r
		}
		r.Bytes, r.Blocks = r.Bytes+b.size, r.Blocks+1
	}
	all := []Relief{}
	for _, r := range byClass {
		all = append(all, *r)
	}
	slices.SortFunc(all, func(a, b Relief) int {
		return cmp.Or(btoi(a.Advice == "")-btoi(b.Advice == ""), cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Class, b.Class))
	})
	return all
}

// relieve fills Relief and StacksBy.
func (x *FailureReport) relieve(t *recording.Trace, s *state) {
	x.Relief = reliefs(t, s)
	if len(x.Relief) == 1 && x.Relief[0].Class == ClassNoStack {
		x.StacksBy = recordStacks(kindOf(t))
	}
}

// recordStacks is the command that records stacks, of a program as the one of a run.
func recordStacks(kind runKind) string {
	switch kind {
	case runCistern:
		return "cistern run --stacks python --report oom -- PROGRAM"
	case runDriver:
		return "cistern trace --stacks all -o run.cistern -- PROGRAM"
	case runRMM:
		return ""
	}
	return "cistern record --stacks python -o run.pickle -- PROGRAM"
}
