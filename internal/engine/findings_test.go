package engine_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// findings is what a request that must fail says.
func findings(t *testing.T, alloc func() (cuda.Ptr, error)) (*memory.OutOfMemoryError, string) {
	t.Helper()
	var oom *memory.OutOfMemoryError
	if _, err := alloc(); !errors.As(err, &oom) {
		t.Fatalf("%v; want out of memory", err)
	}
	if strings.Contains(oom.Error(), "\n") {
		t.Errorf("Error is not one line: %q", oom.Error())
	}
	lines := oom.Findings(memory.Names{Tag: func(tag uint32) string {
		if tag == 1 {
			return "activations"
		}
		return ""
	}})
	for _, s := range lines {
		if s == "" || strings.Contains(s, "\n") {
			t.Errorf("not one line: %q", s)
		}
	}
	if len(lines) < 1 || len(lines) > 2 {
		t.Errorf("%d lines", len(lines))
	}
	return oom, strings.Join(lines, "\n")
}

// The findings name who holds the memory and what would have met the request, and no more than the figures say.
func TestFindings(t *testing.T) {
	const capacity = 256 * mib
	e := newEngine(t, sim.Options{Capacity: capacity}, config.Options{Limit: 64 * mib}, 1)
	st := e.streams[0]
	e.alloc(t, 20*mib, st)
	oom, text := findings(t, func() (cuda.Ptr, error) { return e.dev.Alloc(100*mib, st) })
	want := `allocated: 20.00 MiB, without stacks and tags: the settings stacks:python and stacks:native record stacks
would help: a limit of 120.00 MiB (now 64.00 MiB), or asking for less: with nothing in use there would be 64.00 MiB`
	if text != want {
		t.Errorf("with a limit:\n%s\nwant:\n%s", text, want)
	}
	if oom.DriverTotal != capacity || oom.Need != 100*mib || oom.Tags != nil {
		t.Errorf("%+v", oom)
	}
	e.dev.SetLimit(oom.Reserved + 100*mib) // as was said
	e.free(t, e.alloc(t, 100*mib, st))
	e.dev.SetLimit(0)

	pool, err := e.dev.NewPool(memory.PoolID{3, 4}, config.PoolOptions{})
	must(t, err)
	if err := e.dev.Captures.Begin(st, pool); err != nil {
		t.Fatal(err)
	}
	pinned, err := e.dev.AllocWith(40*mib, st, engine.AllocOptions{Tag: 1})
	must(t, err)
	must(t, e.dev.Captures.End(st))
	e.free(t, pinned)
	for i := range 7 {
		_, err := e.dev.AllocWith(uint64(10+i)*mib, st, engine.AllocOptions{Tag: uint32(i % 6)})
		must(t, err)
	}
	e.drv.SetOutside(0, 10*mib)
	oom, text = findings(t, func() (cuda.Ptr, error) { return e.dev.AllocWith(120*mib, st, engine.AllocOptions{Tag: 2}) })
	var tags, pools uint64
	for _, x := range oom.Tags {
		tags += x.Allocated
	}
	for _, x := range oom.Pools {
		pools += x.Allocated
	}
	if tags != oom.Allocated || pools != oom.Allocated || oom.Cached < 40*mib || oom.Pinned != 40*mib || oom.Tag != 2 {
		t.Errorf("tags hold %d, pools %d of %d; %+v", tags, pools, oom.Allocated, oom)
	}
	for _, s := range []string{"; by pool 111.00 MiB the default pool", "0 bytes pool {3, 4} (40.00 MiB more cached, pinned by graphs)",
		"allocated: by tag 46.00 MiB no tag, 15.00 MiB tag 5, 14.00 MiB tag 4, 36.00 MiB in others; by pool",
		"would help: the release of captured pools, which pin 40.00 MiB that is free, or at least"} {
		if !strings.Contains(text, s) {
			t.Errorf("no %q in:\n%s", s, text)
		}
	}
	must(t, pool.Release())
	e.drv.SetOutside(0, 0)
	e.free(t, func() cuda.Ptr { p, err := e.dev.Alloc(120*mib, st); must(t, err); return p }()) // as was said

	e = newEngine(t, sim.Options{Capacity: 64 * mib}, config.Options{Stages: memory.StageGrow}, 2)
	e.free(t, e.alloc(t, 60*mib, e.streams[0]))
	_, text = findings(t, func() (cuda.Ptr, error) { return e.dev.Alloc(50*mib, e.streams[1]) })
	if !strings.Contains(text, "would help: stages:all, as the settings leave out collect+remap+lend+callback+node, or less in pieces: ") {
		t.Errorf("nothing about the stages in:\n%s", text)
	}
	// 20 of 30 chunks are all but free.
	e = newEngine(t, sim.Options{Capacity: 60 * mib}, config.Options{}, 1)
	var blocks []cuda.Ptr
	for range 60 {
		blocks = append(blocks, e.alloc(t, mib, e.streams[0]))
	}
	for i := range 20 {
		e.free(t, blocks[2*i])
	}
	oom, text = findings(t, func() (cuda.Ptr, error) { return e.dev.Alloc(10*mib, e.streams[0]) })
	if oom.Largest != mib || !strings.HasSuffix(text, "would help: less in pieces: 20.00 MiB are cached or free on the device, but the largest free block for this is 1.00 MiB") {
		t.Errorf("the largest block is %d bytes; found:\n%s", oom.Largest, text)
	}
	_, text = findings(t, func() (cuda.Ptr, error) { return e.dev.Alloc(31*mib, e.streams[0]) })
	if !strings.HasSuffix(text, "would help: at least 12.00 MiB less in use") {
		t.Errorf("20 MiB are free and 31, which are 16 chunks, are wanted; found:\n%s", text)
	}
}
