package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// stepsOf are the steps of a failed request by stage; there is one for each stage, in order.
func stepsOf(t *testing.T, oom *memory.OutOfMemoryError) map[memory.Stages]memory.Step {
	t.Helper()
	out := map[memory.Stages]memory.Step{}
	for i, s := range oom.Steps {
		r := memory.StagesInOrder()[i]
		if s.Stage != r || s.Tries > 0 != (oom.Tried&r != 0) || s.Tries == 0 && (s.Gained != 0 || s.Took != 0 || s.Note == "") || s.Took < 0 || strings.Contains(s.Note, "\n") {
			t.Errorf("step %v: %+v, tried %v", r, s, oom.Tried)
		}
		out[s.Stage] = s
	}
	if len(oom.Steps) != memory.NumStages {
		t.Errorf("%d steps: %+v", len(oom.Steps), oom.Steps)
	}
	return out
}

// noted checks what a step says of itself.
func noted(t *testing.T, s memory.Step, tries int, note string) {
	t.Helper()
	if s.Tries != tries || !strings.Contains(s.Note, note) {
		t.Errorf("%+v, want %d tries and %q", s, tries, note)
	}
}

// A request that fails says what each stage did, or why it was passed over.
func TestSteps(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 128 * mib, CallsTakeTime: true}, config.Options{Limit: 60 * mib}, 2)
	st, pool := e.streams[0], e.dev.DefaultPool()
	e.alloc(t, 20*mib, st)
	oom := outOfMemory(t, pool, 50*mib, st)
	s := stepsOf(t, oom)
	noted(t, s[memory.StageFit], 1, "the largest free block is 0 bytes")
	noted(t, s[memory.StageCollect], 0, "nothing that is free waits for the GPU")
	noted(t, s[memory.StageRemap], 1, "0 bytes of free chunks could move")
	noted(t, s[memory.StageGrow], 1, "the limit of 60.00 MiB is in the way")
	noted(t, s[memory.StageLend], 1, "")
	noted(t, s[memory.StageCallback], 0, "no function is registered")
	noted(t, s[memory.StageNode], 0, "no broker is connected")
	noted(t, s[memory.StageSpill], 0, "the pool has none")
	if oom.Stream != st.ID() || oom.Handle != st.Handle() {
		t.Errorf("the request was for stream %+v, not %+v", st.ID(), oom.Stream)
	}

	// The driver has less than it said: what it gave until then was gained, and its words are told.
	e.dev.SetLimit(0)
	e.drv.SetOutside(0, 48*mib)
	s = stepsOf(t, outOfMemory(t, pool, 100*mib, st))
	noted(t, s[memory.StageGrow], 1, "cuMemCreate")
	noted(t, s[memory.StageGrow], 1, "CUDA_ERROR_OUT_OF_MEMORY")
	if g := s[memory.StageGrow]; g.Gained == 0 || g.Gained > 60*mib || g.Took <= 0 {
		t.Errorf("%+v", g)
	}
	s = stepsOf(t, outOfMemory(t, pool, 300*mib, st))
	noted(t, s[memory.StageGrow], 1, "the device has less")
	s = stepsOf(t, outOfMemory(t, pool, 1<<50, st))
	noted(t, s[memory.StageGrow], 0, "no device has that much")

	// Some memory could move, and another pool has some; together it is too little.
	p := e.alloc(t, 20*mib, st)
	q := fromPool(t, e.pool(t, 1, config.PoolOptions{}), 10*mib, st)
	e.free(t, p)
	e.free(t, q)
	other := e.streams[1]
	s = stepsOf(t, outOfMemory(t, pool, 90*mib, other))
	noted(t, s[memory.StageCollect], 1, "waited for the GPU") // the other stream's work, so that all could be given back
	noted(t, s[memory.StageRemap], 2, "20.00 MiB of free chunks could move")
	noted(t, s[memory.StageLend], 2, "10.00 MiB of free chunks of other pools were available")
	must(t, e.a.Trim())

	// A function gives memory back, which makes the reclaim stages start over, and it is too little.
	p = e.alloc(t, 30*mib, st)
	asked := 0
	e.dev.OnOutOfMemory(func(uint64) bool { asked++; return false })
	e.dev.OnOutOfMemory(func(uint64) bool {
		e.free(t, p)
		p = 0
		e.drv.Advance(3 * time.Millisecond)
		return true
	})
	s = stepsOf(t, outOfMemory(t, pool, 90*mib, st))
	noted(t, s[memory.StageFit], 2, "the largest free block is 30.00 MiB")
	noted(t, s[memory.StageGrow], 2, "")
	noted(t, s[memory.StageCallback], 1, "1 of 2 functions gave memory back")
	if c := s[memory.StageCallback]; asked != 1 || c.Gained != 30*mib || c.Took < 3*time.Millisecond || c.Took > 4*time.Millisecond {
		t.Errorf("%+v", c)
	}

	// The settings leave stages out.
	e = newEngine(t, sim.Options{Capacity: 64 * mib}, config.Options{Stages: memory.StageGrow}, 1)
	s = stepsOf(t, outOfMemory(t, e.dev.DefaultPool(), 65*mib, e.streams[0]))
	for _, r := range []memory.Stages{memory.StageCollect, memory.StageRemap, memory.StageLend, memory.StageCallback} {
		noted(t, s[r], 0, "off by the settings")
	}
}

// What waits for other streams is waited for, and what that freed is told.
func TestStepsOfCollecting(t *testing.T) {
	for _, ready := range []bool{false, true} {
		opts := config.Options{}
		if ready {
			opts.CrossStream = config.CrossStreamReady
		}
		e := checked(t, opts, 64*mib, 3)
		st, other := e.streams[0], e.streams[1]
		p := e.alloc(t, 40*mib, st)
		must(t, e.a.RecordStream(p, other))
		e.use(t, other, p, 40*mib)
		e.free(t, p)
		by := st
		if ready {
			by = e.streams[2] // which may not be made to wait
		}
		c := stepsOf(t, outOfMemory(t, e.dev.DefaultPool(), 65*mib, by))[memory.StageCollect]
		if c.Gained != 40*mib || c.Tries == 0 || ready && (c.Took <= 0 || c.Note != "waited for the GPU") {
			t.Errorf("ready %v: %+v", ready, c)
		}
	}
}

// Pools of segments, limits of pools and spills have steps of their own.
func TestStepsOfPools(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 128 * mib}, config.Options{}, 1)
	st := e.streams[0]
	pool := e.pool(t, 1, config.PoolOptions{Kind: config.PoolMalloc, Limit: 64 * mib, Spill: resource.Limiting(resource.Pinned(e.drv, 0), 32*mib)})
	e.free(t, fromPool(t, pool, 30*mib, st))
	s := stepsOf(t, outOfMemory(t, pool, 70*mib, st))
	noted(t, s[memory.StageRemap], 0, "segments, which do not move")
	noted(t, s[memory.StageGrow], 2, "the pool's limit of 64.00 MiB is in the way")
	noted(t, s[memory.StageSpill], 1, "CUDA_ERROR_OUT_OF_MEMORY")
	if g := s[memory.StageLend]; g.Gained != 30*mib || g.Tries != 2 {
		t.Errorf("%+v", g)
	}
	plain := e.pool(t, 2, config.PoolOptions{Kind: config.PoolMalloc})
	s = stepsOf(t, outOfMemory(t, plain, 200*mib, st))
	noted(t, s[memory.StageGrow], 1, "cuMemAlloc")
	e.dev.SetLimit(50 * mib)
	s = stepsOf(t, outOfMemory(t, plain, 60*mib, st))
	noted(t, s[memory.StageGrow], 1, "the limit of 50.00 MiB is in the way")
	must(t, e.a.Trim())
	// Memory that others register stays where it is.
	e.dev.OnUnmap(func(cuda.Ptr, uint64) {})
	s = stepsOf(t, outOfMemory(t, e.dev.DefaultPool(), 60*mib, st))
	noted(t, s[memory.StageRemap], 0, "nothing moves")
}

// A resume that fails has the stages that there are for it.
func TestStepsOfResume(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 128 * mib}, config.Options{}, 1)
	p := e.alloc(t, 60*mib, e.streams[0])
	_, err := e.dev.Pause(engine.Selection{}, config.PauseOptions{})
	must(t, err)
	q := e.alloc(t, 40*mib, e.streams[0])
	e.drv.SetOutside(0, 50*mib)
	e.dev.OnOutOfMemory(func(uint64) bool { return false })
	_, err = e.dev.Resume(engine.Selection{})
	var oom *memory.OutOfMemoryError
	if !errors.As(err, &oom) {
		t.Fatal(err)
	}
	s := stepsOf(t, oom)
	noted(t, s[memory.StageFit], 0, "not for resuming")
	noted(t, s[memory.StageGrow], 1, "CUDA_ERROR_OUT_OF_MEMORY")
	noted(t, s[memory.StageLend], 1, "")
	noted(t, s[memory.StageCallback], 1, "0 of 1 functions")
	e.free(t, q)
	_, err = e.dev.Resume(engine.Selection{})
	must(t, err)
	e.free(t, p)
}

// The failure names the request's own stack, and the findings who holds the most, in two lines: those that are called the same
// together, and the callers of those whose innermost frame is.
func TestFindingsOfStacks(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 256 * mib}, config.Options{}, 1)
	e.a.Stacks.Keep(true)
	var stacks []uint32
	for i := range 8 {
		stacks = append(stacks, e.a.Stacks.Of([]uint64{uint64(i + 1), 99}))
	}
	for i, n := range stacks {
		for range 2 {
			_, err := e.dev.AllocWith(uint64(i+1)*mib, e.streams[0], engine.AllocOptions{Stack: n, Tag: uint32(i), Library: uint8(i)})
			must(t, err)
		}
	}
	e.alloc(t, 9*mib, e.streams[0])
	_, err := e.dev.AllocWith(300*mib, e.streams[0], engine.AllocOptions{Stack: stacks[2], Thread: 123})
	var oom *memory.OutOfMemoryError
	if !errors.As(err, &oom) {
		t.Fatal(err)
	}
	if oom.Stack != stacks[2] || oom.Thread != 123 || !slices.Equal(oom.Stacks, e.dev.Views.StackUsage()) {
		t.Errorf("%+v", oom)
	}
	for name, c := range map[string]struct {
		stack func(i uint64) (string, string)
		want  string
	}{
		"different": {func(i uint64) (string, string) { return fmt.Sprintf("f layer.py:%d", i), "main m.py:1" },
			"allocated: 16.00 MiB stack 8, 14.00 MiB f layer.py:7, 12.00 MiB f layer.py:6, 39.00 MiB in others; by tag "},
		"by caller": {func(i uint64) (string, string) { return "f layer.py:1", fmt.Sprintf("main m.py:%d", i%2) },
			"allocated: 32.00 MiB f layer.py:1 < main m.py:1, 24.00 MiB f layer.py:1 < main m.py:0, 16.00 MiB stack 8, 9.00 MiB in others; by tag "},
		"the same": {func(uint64) (string, string) { return "f layer.py:1", "main m.py:1" },
			"allocated: 56.00 MiB f layer.py:1, 16.00 MiB stack 8, 9.00 MiB without a stack; by tag "},
	} {
		lines := oom.Findings(memory.Names{Stack: func(n uint32) (string, string) {
			if n == stacks[7] {
				return "", ""
			}
			return c.stack(e.a.Stacks.Frames(n)[0])
		}})
		if len(lines) != 2 || !strings.HasPrefix(lines[0], c.want) || !strings.Contains(lines[0], "; by library ") {
			t.Errorf("%s: %d lines: %s\nwant %s", name, len(lines), lines[0], c.want)
		}
	}
	e.a.Stacks.Keep(false)
	if oom := outOfMemory(t, e.dev.DefaultPool(), 300*mib, e.streams[0]); oom.Stacks != nil || strings.Contains(oom.Findings(memory.Names{})[0], "stack") {
		t.Errorf("%+v", oom.Stacks)
	}
}
