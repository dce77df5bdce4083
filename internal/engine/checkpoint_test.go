package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// A tree of graphs in one pool: after the second branch the pool is put back to where the first began, and the graph of
// the root stays valid.
func TestRestore(t *testing.T) {
	for _, text := range []string{"", "backend:malloc", "single_handle:true"} {
		opts, err := config.Parse(text)
		must(t, err)
		e := checked(t, opts, 512*mib, 2)
		st := e.streams[0]
		pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
		must(t, err)
		var out []cuda.Ptr
		graph := func(sizes ...uint64) func() {
			return func() {
				temp := e.alloc(t, 40*mib, st)
				e.use(t, st, temp, 40*mib)
				for _, n := range sizes {
					p, err := e.dev.AllocWith(n, st, engine.AllocOptions{Tag: uint32(len(out))})
					must(t, err)
					e.use(t, st, p, n)
					out = append(out, p)
				}
				e.free(t, temp)
			}
		}
		root := e.capture(t, st, pool, graph(1000, 3*mib, 20*mib, 100))
		after := pool.Blocks()
		if len(after) != 4 || !slices.IsSortedFunc(after, func(a, b memory.Block) int { return int(a.Base) - int(b.Base) }) {
			t.Fatalf("%q: blocks after the root: %+v", text, after)
		}
		stats := e.dev.Views.Stats()
		branch := e.capture(t, st, pool, graph(5*mib, 300))
		for _, i := range []int{1, 3, 4} { // two of the root's, one of the branch's
			e.free(t, out[i])
		}
		must(t, pool.Restore(after))
		if d := cmp.Diff(after, pool.Blocks()); d != "" {
			t.Errorf("%q: restored (+) is not what was (-):\n%s", text, d)
		}
		now := e.dev.Views.Stats()
		if now.Allocated.All.Current != stats.Allocated.All.Current || now.Requested.All.Current != stats.Requested.All.Current ||
			now.Allocations.All.Current != 4 || now.ActiveBytes.All.Current+now.InactiveBytes.All.Current != int64(e.drv.ReservedBytes(0)) ||
			now.Allocations.All.Added-now.Allocations.All.Removed != 4 {
			t.Errorf("%q: statistics before %+v, after %+v", text, stats, now)
		}
		if err := e.a.Free(out[5]); !errors.Is(err, memory.ErrUnknownPointer) {
			t.Errorf("%q: a block of the branch is still live: %v", text, err)
		}
		other := e.capture(t, st, pool, graph(7*mib, 9*mib))
		for _, p := range out[6:] {
			for _, b := range after {
				if p >= b.Base && p < b.Base+cuda.Ptr(b.Size) {
					t.Errorf("%q: the other branch was given memory of the root", text)
				}
			}
		}
		null := e.streams[1]
		must(t, root.Launch(0, null.Handle()))
		must(t, other.Launch(0, null.Handle()))
		must(t, branch.Check())
		must(t, pool.Restore(nil))
		if len(pool.Blocks()) != 0 || e.dev.Views.Stats().Allocations.All.Current != 0 {
			t.Errorf("%q: blocks are left", text)
		}
		must(t, pool.Release())
		must(t, e.a.Trim())
		must(t, e.a.Close())
	}
}

// What cannot be restored changes nothing.
func TestRestoreFails(t *testing.T) {
	e := checked(t, config.Options{History: 1000}, 512*mib, 2)
	st, side := e.streams[0], e.streams[1]
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	must(t, err)
	whole, err := e.dev.NewPool(memory.PoolID{0, 2}, config.PoolOptions{SegmentPerBlock: true, Upstream: resource.Device(e.drv, 0)})
	must(t, err)
	var ps []cuda.Ptr
	for _, n := range []uint64{10 * mib, 20 * mib, 1000, 30 * mib} {
		p, err := pool.Alloc(n, st)
		must(t, err)
		e.use(t, st, p, n)
		ps = append(ps, p)
	}
	w, err := whole.Alloc(4*mib, st)
	must(t, err)
	e.use(t, st, w, 4*mib)
	other := e.alloc(t, mib, st)
	was := pool.Blocks()
	base := func(p cuda.Ptr) memory.Block {
		b, err := e.a.Base(p)
		must(t, err)
		return b
	}
	with := func(p cuda.Ptr, change func(*memory.Block)) []memory.Block {
		b := base(p)
		change(&b)
		return append(slices.DeleteFunc(slices.Clone(was), func(x memory.Block) bool { return x.Base == b.Base }), b)
	}
	must(t, e.a.RecordStream(ps[1], side))
	of := base(w)
	e.free(t, w)
	e.free(t, ps[3])
	kept := pool.Blocks()
	for name, c := range map[string]struct {
		pool   *engine.Pool
		blocks []memory.Block
	}{
		"longer than its memory": {pool, with(ps[2], func(b *memory.Block) { b.Size, b.Requested = 64*mib, 64*mib })},
		"not aligned":            {pool, with(ps[0], func(b *memory.Block) { b.Base += 256 })},
		"of another pool":        {pool, append(slices.Clone(was), base(other))},
		"no pool's":              {pool, with(ps[0], func(b *memory.Block) { b.Base = 1 << 46 })},
		"twice":                  {pool, append(slices.Clone(was), was[0])},
		"overlapping":            {pool, append(slices.Clone(was), memory.Block{Base: was[len(was)-1].Base + 512, Size: 512, Requested: 1})},
		"empty":                  {pool, with(ps[0], func(b *memory.Block) { b.Requested = 0 })},
		"smaller than asked for": {pool, with(ps[0], func(b *memory.Block) { b.Requested = b.Size + 1 })},
		"used by another stream": {pool, with(ps[1], func(b *memory.Block) { b.Size, b.Requested = 10*mib, 10*mib })},
		"of another stream":      {pool, with(ps[0], func(b *memory.Block) { b.Stream = side.ID() })},
		"tagged too high":        {pool, with(ps[0], func(b *memory.Block) { b.Tag = 1 << 20 })},
		"a part of a segment":    {whole, []memory.Block{{Base: of.Base, Size: 2 * mib, Requested: 2 * mib}}},
	} {
		stats, n := fmt.Sprint(e.dev.Views.Stats()), len(events(e))
		if err := c.pool.Restore(c.blocks); err == nil {
			t.Errorf("%s: was restored", name)
		}
		if d := cmp.Diff(kept, pool.Blocks()); d != "" {
			t.Errorf("%s: what failed changed what is live:\n%s", name, d)
		}
		if now := fmt.Sprint(e.dev.Views.Stats()); now != stats || len(events(e)) != n {
			t.Errorf("%s: what failed changed the statistics:\n%s\n%s", name, stats, now)
		}
	}
	must(t, whole.Restore([]memory.Block{of}))
	if d := cmp.Diff([]memory.Block{of}, whole.Blocks()); d != "" {
		t.Error(d)
	}
	// The history tells what a restore did. What another stream uses completes later.
	before := len(events(e))
	last := was[slices.IndexFunc(was, func(b memory.Block) bool { return b.Base == ps[3] })]
	must(t, pool.Restore([]memory.Block{last, base(ps[0])}))
	kinds := map[event.Kind]int{}
	for _, x := range events(e)[before:] {
		kinds[x.Kind]++
	}
	if d := cmp.Diff(kinds, map[event.Kind]int{event.FreeRequested: 2, event.FreeCompleted: 1, event.Alloc: 1}); d != "" {
		t.Error(d)
	}
	if err := e.a.Free(ps[1]); !errors.Is(err, memory.ErrUnknownPointer) {
		t.Errorf("freed by the restore, and again: %v", err)
	}
	must(t, e.a.Free(ps[3]))
}

func events(e *fixture) []event.Event {
	list, _ := e.dev.History.Read()
	return list
}

func TestLargestFree(t *testing.T) {
	e := checked(t, config.Options{}, 512*mib, 2)
	st := e.streams[0]
	is := func(want uint64) {
		t.Helper()
		if n := e.dev.Views.LargestFree(st); n != want {
			t.Errorf("largest free block of %d bytes, want %d", n, want)
		}
		if want == 0 {
			return
		}
		e.drv.ResetCalls()
		e.free(t, e.alloc(t, want, st))
		if n := e.drv.Calls().Count; n != 0 {
			t.Errorf("%d bytes took %d driver calls", want, n)
		}
	}
	is(0)
	small := e.alloc(t, 1000, st)
	is(256 * kib)
	large := e.alloc(t, 30*mib, st)
	is(256 * kib)
	e.free(t, large)
	is(30 * mib)
	large = e.alloc(t, 30*mib-512, st)
	is(256 * kib)
	e.free(t, large)
	e.free(t, small)
	pool, err := e.dev.NewPool(memory.PoolID{0, 1}, config.PoolOptions{})
	must(t, err)
	must(t, e.dev.Captures.Route(st, pool))
	is(0)
	e.free(t, e.alloc(t, 12*mib, st))
	is(12 * mib)
	must(t, e.dev.Captures.Unroute(st))
	if n := e.dev.Views.LargestFree(e.streams[1]); n != 0 {
		t.Errorf("a stream that has nothing has %d bytes", n)
	}
}
