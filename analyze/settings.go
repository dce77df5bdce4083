package analyze

import (
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/replay"
)

// asyncConf selects the driver's own pools. It is a policy of its own in replay.
const asyncConf = "backend:cudaMallocAsync"

// setting is one key of PYTORCH_ALLOC_CONF and the values that are tried for it.
type setting struct {
	key    string
	values []string
	// limited: it does something only where the process has a limit.
	limited bool
	// native: it does nothing for expandable segments.
	native bool
}

// tried are the settings that a search goes through. PyTorch refuses max_split_size_mb below 20.
var tried = []setting{
	{key: "expandable_segments", values: []string{"True"}},
	{key: "max_split_size_mb", values: []string{"32", "64", "128", "256", "512"}, native: true},
	{key: "large_segment_size_mb", values: []string{"32", "64", "128"}},
	{key: "roundup_power2_divisions", values: []string{"2", "4", "8", "16"}},
	{key: "garbage_collection_threshold", values: []string{"0.6", "0.8", "0.9"}, limited: true, native: true},
}

// torchSpec replays PyTorch's allocator with these settings instead of the trace's.
func torchSpec(conf string) replay.Spec {
	if conf == asyncConf {
		return replay.Spec{Name: "torch-async"}
	}
	if conf == "" {
		conf = "default"
	}
	return replay.Spec{Name: "torch", Conf: conf, HasConf: true}
}

func settingsIn(conf string) int {
	if conf == "" {
		return 0
	}
	return strings.Count(conf, ":")
}

// settings tries every value by itself, then the combinations of each key's best value.
func (s *search) settings() error {
	var keys []setting
	for _, k := range tried {
		if k.limited && s.capacity == 0 {
			continue
		}
		// A value that this PyTorch, as modelled, does not know is left out.
		k.values = slices.DeleteFunc(slices.Clone(k.values), func(v string) bool {
			_, err := replay.ParseTorchConf(k.key + ":" + v)
			return err != nil
		})
		if len(k.values) > 0 {
			keys = append(keys, k)
		}
	}
	single := []replay.Spec{torchSpec("")}
	if _, err := replay.ParseSpec("torch-async"); err == nil {
		single = append(single, torchSpec(asyncConf))
	}
	for _, k := range keys {
		for _, v := range k.values {
			single = append(single, torchSpec(k.key+":"+v))
		}
	}
	if err := s.all(single); err != nil {
		return err
	}
	return s.all(s.combinations(keys))
}

// combinations are all subsets of two keys and more, each key with the value that did best by itself.
func (s *search) combinations(keys []setting) []replay.Spec {
	var specs []replay.Spec
	for set := 1; set < 1<<len(keys); set++ {
		var parts []string
		expandable, native := false, false
		for i, k := range keys {
			if set&(1<<i) == 0 {
				continue
			}
			expandable = expandable || k.key == "expandable_segments"
			native = native || k.native
			parts = append(parts, k.key+":"+s.bestValue(k))
		}
		if len(parts) < 2 || expandable && native {
			continue
		}
		conf := strings.Join(parts, ",")
		if _, err := replay.ParseTorchConf(conf); err == nil {
			specs = append(specs, torchSpec(conf))
		}
	}
	return specs
}

// bestValue is the value of a key that did best by itself.
func (s *search) bestValue(k setting) string {
	return slices.MinFunc(k.values, func(a, b string) int {
		x, y := s.known[canonical(k.key+":"+a)], s.known[canonical(k.key+":"+b)]
		if x == nil || y == nil {
			return 0
		}
		return x.merit(s).compare(y.merit(s), 1)
	})
}

// canonical is how the model writes a setting, which is what choices are known by.
func canonical(conf string) string {
	c, err := replay.ParseTorchConf(conf)
	if err != nil {
		return conf
	}
	if text := c.String(); text != "default" {
		return text
	}
	return ""
}

// breaks are what each setting breaks or asks for. Sources: PyTorch's manual (notes/cuda, "Optimizing memory usage"),
// c10/cuda/CUDACachingAllocator.cpp and CUDAMallocAsyncAllocator.cpp of torch 2.11, the CUDA driver manual on virtual
// memory, pytorch #165685.
var breaks = []struct {
	setting string // as written, up to its value where the value does not matter
	says    []string
}{
	{"expandable_segments:True", []string{
		"cudaIpcGetMemHandle fails on this memory: libraries that share raw CUDA IPC handles stop working; tensors sent " +
			"between PyTorch processes need pidfd_getfd, which many containers refuse",
		"memory is mapped from many handles: registration for GPUDirect RDMA (nvidia_peermem) and of NCCL user buffers " +
			"may fail across them",
		"PyTorch's manual calls it experimental",
	}},
	{"max_split_size_mb:", []string{
		"larger cached blocks are never split and serve only requests of nearly their size: more driver calls and, near " +
			"the limit, waits; PyTorch's manual calls it a last resort",
	}},
	{"large_segment_size_mb:", []string{
		"only newer versions of PyTorch know it; others refuse to start with an unknown setting",
	}},
	{"garbage_collection_threshold:", []string{
		"works only with a memory fraction set (torch.cuda.set_per_process_memory_fraction), and each block it frees " +
			"waits for the GPU",
	}},
	{"roundup_power2_divisions:", []string{
		"requests are rounded up further: live tensors take more memory, in exchange for more reuse",
	}},
	{asyncConf, []string{
		"no memory snapshots and history, no tensors shared between processes; torch.compile with CUDA graphs fails " +
			"(\"does not yet support checkPoolLiveAllocations\")",
		"the other settings here are ignored; needs CUDA 11.4 or newer",
	}},
}

// Breaks says what stops working, or is to be known, with these settings of PYTORCH_ALLOC_CONF.
func Breaks(conf string) []string {
	found := []string{}
	for _, b := range breaks {
		for _, part := range strings.Split(conf, ",") {
			if strings.HasPrefix(part, b.setting) {
				found = append(found, b.says...)
				break
			}
		}
	}
	return found
}
