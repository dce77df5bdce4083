package memory_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/memory"
)

const mib = 1 << 20

// Every set of stages is read as it is written.
func TestStages(t *testing.T) {
	for r := memory.StageFit; r < 1<<memory.NumStages; r++ {
		if r&memory.StageFit == 0 {
			continue // fit is always tried
		}
		if got, err := memory.ParseStages(r.String()); err != nil || got != r {
			t.Errorf("%s is read as %s, %v", r, got, err)
		}
	}
	if r, err := memory.ParseStages("all"); err != nil || r != memory.AllStages {
		t.Errorf("all is %s, %v", r, err)
	}
	// The numbers are in recordings and in cistern_oom; names are in the order of trying.
	if memory.StageSpill != 64 || memory.StageNode != 128 || (memory.StageSpill|memory.StageNode).String() != "node+spill" {
		t.Errorf("spill is %d, node %d: %s", memory.StageSpill, memory.StageNode, memory.StageSpill|memory.StageNode)
	}
	for _, text := range []string{"", "merge", "fit+", "all+fit"} {
		if r, err := memory.ParseStages(text); err == nil || !strings.Contains(err.Error(), "collect, remap") {
			t.Errorf("%q is %s, %v", text, r, err)
		}
	}
}

// The error is one line, is CUDA's out of memory, and leads to its cause.
func TestOutOfMemoryError(t *testing.T) {
	cause := errors.New("the upstream is full")
	e := &memory.OutOfMemoryError{Device: 1, Requested: 100 * mib, Need: 100 * mib, Reserved: 50 * mib, Allocated: 40 * mib, Paused: 5 * mib, Pending: 2 * mib,
		Cached: 10 * mib, Pinned: 3 * mib, Limit: 64 * mib, PoolLimit: 52 * mib, PoolReserved: 45 * mib, Pool: memory.PoolID{1, 2},
		DriverFree: 7 * mib, DriverTotal: 80 * mib, Upstream: "managed", Tried: memory.StageFit | memory.StageGrow, Cause: cause}
	want := "out of memory on device 1: tried to allocate 100.00 MiB of managed memory; 50.00 MiB reserved, 40.00 MiB of it allocated, 5.00 MiB more paused, " +
		"limit 64.00 MiB, of it 45.00 MiB in pool {1, 2}, whose limit is 52.00 MiB, 7.00 MiB free on the device, 2.00 MiB waiting for other streams, " +
		"3.00 MiB cached in pools that others cannot use; tried: fit+grow"
	if e.Error() != want {
		t.Errorf("%s\nwant:\n%s", e, want)
	}
	if !errors.Is(e, cuda.ErrOutOfMemory) || !errors.Is(e, cause) {
		t.Error("errors.Is does not find what it is")
	}
	if e.Cause = nil; !errors.Is(e, cuda.ErrOutOfMemory) {
		t.Error("without a cause it is not out of memory")
	}
}

// Findings add up what has one name, name the most first, and say where one of several uses of a name is from.
func TestFindings(t *testing.T) {
	use := func(n uint64) memory.Use { return memory.Use{Blocks: 1, Allocated: n * mib} }
	e := &memory.OutOfMemoryError{Requested: 20 * mib, Need: 20 * mib, Reserved: 60 * mib, Allocated: 60 * mib, DriverFree: 4 * mib, DriverTotal: 64 * mib,
		Stacks:    []memory.StackUse{{Stack: 1, Use: use(20)}, {Stack: 2, Use: use(15)}, {Stack: 3, Use: use(12)}, {Use: use(8)}, {Stack: 4, Use: use(5)}},
		Tags:      []memory.TagUse{{Tag: 0, Use: use(40)}, {Tag: 7, Use: use(20)}},
		Libraries: []memory.LibraryUse{{Library: 3, Use: use(50)}, {Library: 0, Use: use(10)}},
		Pools:     []memory.PoolUse{{Allocated: 45 * mib}, {Pool: memory.PoolID{1, 2}, Allocated: 15 * mib, Free: mib, Pinned: true, Upstream: "managed"}}}
	names := memory.Names{Tag: func(uint32) string { return "weights" }, Stack: func(stack uint32) (place, from string) {
		switch stack {
		case 1, 3:
			return "linear", "encoder"
		case 2:
			return "linear", "decoder"
		}
		return "", ""
	}}
	want := "allocated: 32.00 MiB linear < encoder, 15.00 MiB linear < decoder, 8.00 MiB without a stack, 5.00 MiB in others; " +
		"by tag 40.00 MiB no tag, 20.00 MiB weights; by library 50.00 MiB library 3, 10.00 MiB others; " +
		"by pool 45.00 MiB the default pool, 15.00 MiB pool {1, 2} (managed, 1.00 MiB more cached, pinned by graphs)\n" +
		"would help: at least 16.00 MiB less in use"
	e.Steps = []memory.Step{{Stage: memory.StageNode, Note: "no broker is connected"}}
	if got := strings.Join(e.Findings(names), "\n"); got != want {
		t.Errorf("%s\nwant:\n%s", got, want)
	}
	e.Steps[0] = memory.Step{Stage: memory.StageNode, Tries: 1, Took: 1500 * time.Microsecond, Note: "other processes released 0 bytes"}
	if got := e.Findings(names); len(got) != 3 || got[1] != "node's broker, 2ms: other processes released 0 bytes" {
		t.Errorf("%q", got)
	}
}
