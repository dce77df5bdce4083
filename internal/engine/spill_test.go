package engine_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/memory"
)

// What nothing else can meet comes from the pool's spill, is the pool's to all who ask, and goes back there.
func TestSpill(t *testing.T) {
	for name, o := range map[string]config.PoolOptions{"chunks": {}, "malloc": {Kind: config.PoolMalloc}, "whole": {SegmentPerBlock: true},
		"limit": {Limit: 100 * mib}, "upstream": {Upstream: newShelf(100*mib, hostMemory)}} {
		t.Run(name, func(t *testing.T) {
			capacity := uint64(100 * mib)
			if o.Limit != 0 {
				capacity = 300 * mib
			}
			e := checked(t, config.Options{History: 100}, capacity, 2)
			st := e.streams[0]
			host := newShelf(80*mib, hostMemory)
			asked := 0
			o.Spill, o.OnOutOfMemory = host, func(uint64) bool { asked++; return false }
			pool := e.pool(t, 1, o)
			a, b := fromPool(t, pool, 60*mib, st), fromPool(t, pool, 30*mib, st)
			e.dev.History.Drain(nil)
			x := fromPool(t, pool, 20*mib, st)
			if host.held() != 20*mib || asked != 1 {
				t.Fatalf("%d bytes spilled, %d times asked", host.held(), asked)
			}
			var met memory.Stages
			for _, ev := range e.dev.History.Drain(nil) {
				if ev.Kind == event.Retry {
					met |= memory.Stages(ev.Flags)
				}
				if id := e.dev.Views.Pools()[ev.Pool]; id != pool.ID() {
					t.Errorf("an event of pool %v", id)
				}
			}
			if k := e.dev.Views.Stats().Counters; met != memory.StageSpill || k.BySpill != 1 || k.OOMs != 0 {
				t.Errorf("met by %v, %+v", met, k)
			}
			y := fromPool(t, pool, 1000, e.streams[1])
			if s := pool.Stats(); s.Spilled != 20*mib+min(512, s.Spilled%mib) && o.SegmentPerBlock == false || s.Blocks != 4 || s.Limit != o.Limit {
				t.Errorf("%+v", s)
			}
			if got, err := e.a.Base(x); err != nil || got.Pool != pool.ID() || got.Size != 20*mib {
				t.Errorf("%+v, %v", got, err)
			}
			sum, used := uint64(0), 0
			for _, g := range e.dev.Views.SnapshotPool(pool.ID()) {
				sum += g.Size
				for _, k := range g.Blocks {
					if k.State == memory.BlockUsed {
						used++
					}
				}
			}
			if s := pool.Stats(); s.Reserved != sum || used != 4 || s.PeakReserved != sum {
				t.Errorf("%+v, %d bytes and %d blocks in the snapshot", s, sum, used)
			}
			if u := e.dev.Views.PoolUsage(); len(u) != 1 || u[0].Spilled != pool.Stats().Spilled || u[0].Pool != pool.ID() {
				t.Errorf("%+v", u)
			}
			oom := outOfMemory(t, pool, 70*mib, st)
			if oom.Tried&memory.StageSpill == 0 || !strings.Contains(oom.Error(), "+spill") || !errors.Is(oom.Cause, cuda.ErrOutOfMemory) {
				t.Errorf("%v, because %v", oom, oom.Cause)
			}
			blocks := pool.Blocks()
			e.free(t, x)
			x = fromPool(t, pool, 20*mib, st) // again, from what the spill has cached
			if host.held() > 22*mib {
				t.Errorf("%d bytes held", host.held())
			}
			e.free(t, x)
			if name != "upstream" { // there the spill's memory is of the same kind and went before it came again
				must(t, pool.Restore(blocks))
				e.free(t, x)
			}
			host.broken = errors.New("the host is on fire")
			if _, err := pool.Alloc(70*mib, st); !errors.Is(err, host.broken) || errors.Is(err, cuda.ErrOutOfMemory) {
				t.Error(err)
			}
			host.broken = nil
			e.free(t, a)
			if p := fromPool(t, pool, 50*mib, st); host.held() > 22*mib {
				t.Error("spilled though there is room")
			} else {
				e.free(t, p)
			}
			e.free(t, b)
			must(t, pool.Trim())
			must(t, pool.Release())
			if host.held() > 2*mib {
				t.Errorf("%d bytes are held by the released pool's last block", host.held())
			}
			e.free(t, y)
			must(t, e.a.Trim())
			must(t, e.a.Close())
			if host.held() != 0 {
				t.Errorf("%d bytes are still held", host.held())
			}
		})
	}
	e := checked(t, config.Options{Stages: memory.AllStages &^ memory.StageSpill}, 100*mib, 1)
	pool := e.pool(t, 1, config.PoolOptions{Spill: newShelf(1<<30, hostMemory)})
	if oom := outOfMemory(t, pool, 200*mib, e.streams[0]); oom.Off != memory.StageSpill {
		t.Errorf("%v", oom.Off)
	}
}

// What spills while a graph is captured stays until the pool is released.
func TestSpillIntoCapture(t *testing.T) {
	e := checked(t, config.Options{}, 64*mib, 1)
	st := e.streams[0]
	host := newShelf(100*mib, hostMemory)
	pool := e.pool(t, 1, config.PoolOptions{Spill: host})
	must(t, e.dev.Captures.Begin(st, pool))
	must(t, e.drv.BeginCapture(0, st.Handle()))
	x := fromPool(t, pool, 80*mib, st)
	e.free(t, x)
	_, err := e.drv.EndCapture(0, st.Handle())
	must(t, err)
	must(t, e.dev.Captures.End(st))
	must(t, e.a.Trim())
	if host.held() != 80*mib {
		t.Errorf("%d bytes held of what the graph uses", host.held())
	}
	must(t, pool.Release())
	if host.held() != 0 {
		t.Errorf("%d bytes held after the release", host.held())
	}
}

// Functions are asked in their order, the pool's own first and until somebody helps; one that was taken back is not asked
// again and is not running when that returns.
func TestOutOfMemoryFunctions(t *testing.T) {
	e := checked(t, config.Options{}, 64*mib, 1)
	st := e.streams[0]
	var order []string
	var mine []cuda.Ptr
	pool := e.pool(t, 1, config.PoolOptions{Kind: config.PoolMalloc, OnOutOfMemory: func(need uint64) bool {
		order = append(order, "pool")
		if need < 30*mib || need > 34*mib || len(mine) == 0 {
			return false
		}
		e.free(t, mine[0])
		mine = mine[1:]
		return true
	}})
	first := e.dev.OnOutOfMemory(func(uint64) bool { order = append(order, "first"); return false })
	second := e.dev.OnOutOfMemory(func(uint64) bool { order = append(order, "second"); return false })
	mine = []cuda.Ptr{e.alloc(t, 40*mib, st)} // of the default pool, which then has to be given back
	x := fromPool(t, pool, 30*mib, st)
	if !slices.Equal(order, []string{"pool"}) || e.dev.Views.Stats().ByCallback != 1 {
		t.Errorf("asked %v", order)
	}
	order = nil
	outOfMemory(t, pool, 40*mib, st)
	first.Remove()
	first.Remove()
	outOfMemory(t, e.dev.DefaultPool(), 40*mib, st)
	if !slices.Equal(order, []string{"pool", "first", "second", "second"}) {
		t.Errorf("asked %v", order)
	}
	second.Remove()
	e.free(t, x)

	inside, leave := make(chan bool), make(chan bool)
	slow := e.dev.OnOutOfMemory(func(uint64) bool { inside <- true; <-leave; return false })
	never := e.dev.OnOutOfMemory(func(uint64) bool { t.Error("called though it was taken back"); return false })
	var wg sync.WaitGroup
	wg.Go(func() { e.dev.Alloc(100*mib, st) })
	<-inside
	never.Remove()
	done := make(chan bool)
	go func() { slow.Remove(); close(done) }()
	select {
	case <-done:
		t.Error("Remove returned while the function was running")
	case <-time.After(20 * time.Millisecond):
	}
	leave <- true
	<-done
	wg.Wait()
	if _, err := e.dev.Alloc(100*mib, st); err == nil {
		t.Error("100 MiB of 64")
	}
}
