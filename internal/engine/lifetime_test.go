package engine_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/cputime"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// shortLived is a program that makes streams and pools and destroys them again, beside one stream that lasts.
type shortLived struct {
	*fixture
	t    testing.TB
	last *engine.Stream // lasts
	made int
}

func newShortLived(t testing.TB, conf string, check sim.CheckLevel) *shortLived {
	opts, err := config.Parse(conf)
	must(t, err)
	e := newEngine(t, sim.Options{Capacity: 64 << 30, Lag: time.Millisecond, Check: check, OnFault: func(err error) { t.Error(err) }}, opts, 1)
	return &shortLived{fixture: e, t: t, last: e.streams[0]}
}

// shortWork is the kinds of work that a short-lived stream does.
var shortWork = map[string]func(s *shortLived, h cuda.Stream, st *engine.Stream){
	// It is made known and does nothing.
	"known": func(*shortLived, cuda.Stream, *engine.Stream) {},
	"allocates": func(s *shortLived, h cuda.Stream, st *engine.Stream) {
		p, q := s.alloc(s.t, 3*mib, st), s.alloc(s.t, 1000, st)
		must(s.t, s.drv.Use(0, h, p, 3*mib))
		s.free(s.t, p)
		s.free(s.t, q)
	},
	// It uses memory of the stream that lasts, which is freed then.
	"recorded": func(s *shortLived, h cuda.Stream, st *engine.Stream) {
		p := s.alloc(s.t, mib, s.last)
		must(s.t, s.drv.Use(0, h, p, mib))
		must(s.t, s.a.RecordStream(p, st))
		s.free(s.t, p)
	},
	// It gives back what another stream was given.
	"frees": func(s *shortLived, h cuda.Stream, st *engine.Stream) {
		p := s.alloc(s.t, mib, s.last)
		must(s.t, s.a.FreeOn(p, st))
	},
	// The stream that lasts takes over what it had, so that it waits for it.
	"waited for": func(s *shortLived, h cuda.Stream, st *engine.Stream) {
		p := s.alloc(s.t, 16*mib, st)
		must(s.t, s.drv.Use(0, h, p, 16*mib))
		s.free(s.t, p)
		s.dev.SetLimit(uint64(s.dev.Views.Stats().Reserved.All.Current))
		s.free(s.t, s.alloc(s.t, 16*mib, s.last))
		s.dev.SetLimit(0)
	},
	"pool": func(s *shortLived, h cuda.Stream, st *engine.Stream) {
		pool, err := s.dev.NewPool(memory.PoolID{7, uint64(s.made)}, config.PoolOptions{})
		must(s.t, err)
		must(s.t, s.dev.Captures.Route(st, pool))
		p := s.alloc(s.t, 3*mib, st)
		q, err := pool.Alloc(1000, s.last)
		must(s.t, err)
		must(s.t, s.dev.Captures.Unroute(st))
		s.free(s.t, p)
		s.free(s.t, q)
		must(s.t, pool.Release())
	},
	"captured": func(s *shortLived, h cuda.Stream, st *engine.Stream) {
		pool, err := s.dev.NewPool(memory.PoolID{8, uint64(s.made)}, config.PoolOptions{})
		must(s.t, err)
		must(s.t, s.dev.Captures.Begin(st, pool))
		must(s.t, s.drv.BeginCapture(0, h))
		p := s.alloc(s.t, 3*mib, st)
		must(s.t, s.drv.Use(0, h, p, 3*mib))
		s.free(s.t, p)
		_, err = s.drv.EndCapture(0, h)
		must(s.t, err)
		must(s.t, s.dev.Captures.End(st))
		must(s.t, pool.Release())
	},
	"segments": func(s *shortLived, h cuda.Stream, st *engine.Stream) {
		pool, err := s.dev.NewPool(memory.PoolID{9, uint64(s.made)}, config.PoolOptions{Kind: config.PoolMalloc})
		must(s.t, err)
		p, err := pool.Alloc(3*mib, st)
		must(s.t, err)
		s.free(s.t, p)
		must(s.t, pool.Release())
	},
}

// run makes n streams, each of which does one kind of work, and destroys them.
func (s *shortLived) run(n int, work func(s *shortLived, h cuda.Stream, st *engine.Stream)) {
	for range n {
		h := s.drv.NewStreamNonBlocking(0)
		st, err := s.dev.Stream(h)
		must(s.t, err)
		work(s, h, st)
		must(s.t, s.drv.DestroyStream(0, h))
		s.drv.Advance(100 * time.Microsecond)
		s.made++
	}
}

// tables runs n streams and measures the tables. Streams that the program dropped are gone for the engine once they were
// collected.
func (s *shortLived) tables(n int, kind string) map[string]int {
	for ; n > 0; n -= 250 {
		s.run(250, shortWork[kind])
		runtime.GC()
	}
	return engine.Tables(s.dev)
}

// Streams and pools that are gone leave nothing behind in any table, whatever they did. With -short each kind of work is done under
// one configuration.
func TestTablesStayBounded(t *testing.T) {
	confs := []string{"", "told", "history:100", "backend:malloc", "single_handle:true,history:100", "cross_stream:ready"}
	for i, conf := range confs {
		for j, kind := range slices.Sorted(maps.Keys(shortWork)) {
			if testing.Short() && j%len(confs) != i {
				continue
			}
			t.Run(conf+"/"+kind, func(t *testing.T) {
				s := newShortLived(t, strings.TrimPrefix(conf, "told"), sim.CheckOrder)
				if conf == "told" { // so that nothing moves
					s.dev.OnUnmap(func(cuda.Ptr, uint64) {})
				}
				few := quick(1000, 300)
				before := s.tables(few, kind)
				after := s.tables(3*few, kind)
				for name, n := range after {
					if n > before[name]+600 {
						t.Errorf("%s: %d entries after %d streams, %d after %d", name, before[name], few, n, 4*few)
					}
				}
			})
		}
	}
}

// The number of a stream or a pool that is gone is given to another, but never while an event can be read that names it.
func TestHistoryNamesWhatIsGone(t *testing.T) {
	for _, drain := range []int{0, 1, 3} { // how many streams after one another are read of by TakeHistory; 0: none ever
		t.Run(fmt.Sprint(drain), func(t *testing.T) {
			s := newShortLived(t, "history:64", sim.CheckOrder)
			type what struct {
				addr uint64
				kind event.Kind
			}
			streams, pools := map[what]cuda.StreamID{}, map[what]memory.PoolID{} // by the last event of the kind for an address
			numbers := map[uint32]bool{}
			check := func(events []event.Event, streamList []cuda.StreamID, poolList []memory.PoolID) {
				last := map[what]event.Event{}
				for _, e := range events {
					if e.Kind == event.Alloc || e.Kind == event.FreeRequested || e.Kind == event.FreeCompleted {
						last[what{e.Addr, e.Kind}] = e
						numbers[e.Stream] = true
					}
				}
				for w, e := range last {
					if streamList[e.Stream] != streams[w] || poolList[e.Pool] != pools[w] {
						t.Fatalf("after %d streams: event %+v is of stream %+v, pool %v; want %+v, %v", s.made, e, streamList[e.Stream],
							poolList[e.Pool], streams[w], pools[w])
					}
				}
			}
			for s.made < 1500 {
				h := s.drv.NewStreamNonBlocking(0)
				st, err := s.dev.Stream(h)
				must(t, err)
				id := memory.PoolID{3, uint64(s.made)}
				pool, err := s.dev.NewPool(id, config.PoolOptions{})
				must(t, err)
				p, err := pool.Alloc(3*mib, st)
				must(t, err)
				for _, k := range []event.Kind{event.Alloc, event.FreeRequested, event.FreeCompleted} {
					streams[what{uint64(p), k}], pools[what{uint64(p), k}] = st.ID(), id
				}
				must(t, s.drv.Use(0, h, p, 3*mib))
				s.free(t, p)
				must(t, pool.Release())
				must(t, s.drv.DestroyStream(0, h))
				s.drv.Advance(2 * time.Millisecond)
				s.made++
				if drain > 0 && s.made%drain == 0 {
					events, _ := s.dev.History.Take(nil, 1000)
					engine.ForgetStreams(s.dev)
					for range 5 { // who may get a number that is free
						_, err := s.dev.Stream(s.drv.NewStreamNonBlocking(0))
						must(t, err)
					}
					var ids []cuda.StreamID
					for _, st := range s.dev.Views.Streams() {
						ids = append(ids, st.ID())
					}
					check(events, ids, s.dev.Views.Pools())
				} else if drain == 0 {
					engine.ForgetStreams(s.dev)
					r := s.dev.Views.Record(64)
					var ids []cuda.StreamID
					for _, st := range r.Streams {
						ids = append(ids, st.ID)
					}
					check(r.Events, ids, r.Pools)
				}
			}
			if n := engine.Tables(s.dev); len(numbers) > 200 || n["streams"] > 1000 || n["pools"] > 200 {
				t.Errorf("%d numbers were given to streams; %v", len(numbers), n)
			}
		})
	}
}

// The millionth stream, and the millionth pool, costs what the first did, in memory and in time. CISTERN_STREAMS is how many
// of each kind there are; `make soak` sets it.
func TestStreamsAndPoolsByTheMillion(t *testing.T) {
	s := os.Getenv("CISTERN_STREAMS")
	if s == "" {
		t.Skip("CISTERN_STREAMS is not set")
	}
	n, err := strconv.Atoi(s)
	must(t, err)
	for _, kind := range slices.Sorted(maps.Keys(shortWork)) {
		t.Run(kind, func(t *testing.T) {
			s := newShortLived(t, "", sim.CheckNone)
			const parts = 20
			var memory []uint64
			var took []time.Duration
			for range parts {
				began := cputime.Process()
				s.run(n/parts, shortWork[kind])
				took = append(took, cputime.Process()-began)
				memory = append(memory, goBytes())
			}
			// The first parts make tables as long as they will be. Of several, the least is what is not noise.
			early, late := slices.Min(took[1:parts/2]), slices.Min(took[parts/2:])
			least, most := slices.Max(memory[1:parts/2]), slices.Max(memory[parts/2:])
			t.Logf("%d streams: %v each in the first half, %v in the second; %d and %d KiB of memory; %v", s.made,
				early/time.Duration(n/parts), late/time.Duration(n/parts), least/kib, most/kib, engine.Tables(s.dev))
			if late > 2*early {
				t.Errorf("a stream took %v, and later %v", early/time.Duration(n/parts), late/time.Duration(n/parts))
			}
			if most > least+least/10+mib { // streams that were dropped wait for the collector
				t.Errorf("%d bytes of memory, and later %d", least, most)
			}
		})
	}
}

// A stream inherits what one that is gone left behind where its memory cannot move: nothing more is got from the driver, and
// the history tells whose it is.
func TestArenasAreInherited(t *testing.T) {
	for _, conf := range []string{"backend:malloc,history:4000", "single_handle:true,history:4000", "history:4000"} {
		t.Run(conf, func(t *testing.T) {
			s := newShortLived(t, conf, sim.CheckOrder)
			if conf == "history:4000" {
				s.dev.OnUnmap(func(addr cuda.Ptr, _ uint64) { t.Errorf("%#x is unmapped", addr) })
			}
			s.run(300, shortWork["allocates"])
			s.drv.Advance(time.Second)
			held := s.dev.Views.Stats().Reserved.All.Current
			type segment struct {
				size   uint64
				stream uint32
			}
			want := map[uint64]segment{}
			for _, e := range s.dev.History.Drain(nil) {
				switch e.Kind {
				case event.SegmentAlloc, event.SegmentMap:
					if _, ok := want[e.Addr]; ok {
						t.Fatalf("%+v: the segment is there", e)
					}
					want[e.Addr] = segment{e.Size, e.Stream}
				case event.SegmentFree, event.SegmentUnmap:
					if want[e.Addr] != (segment{e.Size, e.Stream}) {
						t.Fatalf("%+v: there is %+v", e, want[e.Addr])
					}
					delete(want, e.Addr)
				}
			}
			have := map[uint64]segment{}
			for _, g := range s.dev.Views.Snapshot() {
				if g.Chunks == nil {
					have[g.Addr] = segment{g.Size, uint32(g.Stream)}
				}
				for at, addr := 0, g.Addr; at < len(g.Chunks); at++ {
					have[addr] = segment{g.Chunks[at].Size, uint32(g.Stream)}
					addr += g.Chunks[at].Size
				}
			}
			if !maps.Equal(want, have) {
				t.Errorf("the history has %v, the device %v", want, have)
			}
			s.run(1000, shortWork["allocates"])
			if now := s.dev.Views.Stats().Reserved.All.Current; now != held {
				t.Errorf("%d bytes held after 300 streams, %d after 1300", held, now)
			}
		})
	}
}

// A Stream that the program has is the one Stream of its CUDA stream, also after the engine has forgotten it.
func TestForgottenStreamIsKnownAgain(t *testing.T) {
	s := newShortLived(t, "", sim.CheckOrder)
	h := s.drv.NewStreamNonBlocking(0)
	st, err := s.dev.Stream(h)
	must(t, err)
	pool, err := s.dev.NewPool(memory.PoolID{1, 1}, config.PoolOptions{})
	must(t, err)
	for _, use := range []func(){
		func() { s.free(t, s.alloc(t, mib, st)) },
		func() {
			must(t, s.dev.Captures.Route(st, pool))
			if engine.ForgetStreams(s.dev); !slices.Contains(engine.LiveStreams(s.dev), st) {
				t.Error("a stream that is routed to a pool was forgotten")
			}
			must(t, s.dev.Captures.Unroute(st))
		},
		func() {
			must(t, s.dev.Captures.Begin(st, pool))
			if engine.ForgetStreams(s.dev); !slices.Contains(engine.LiveStreams(s.dev), st) {
				t.Error("a stream that is captured was forgotten")
			}
			must(t, s.dev.Captures.End(st))
		},
		func() {
			p := s.alloc(t, mib, s.last)
			must(t, s.a.RecordStream(p, st))
			s.free(t, p)
		},
		func() { must(t, s.a.FreeOn(s.alloc(t, mib, s.last), st)) },
		func() {
			if _, err := s.dev.Alloc(1<<47, st); !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Error(err)
			}
		},
		func() {
			again, err := s.dev.Stream(h)
			must(t, err)
			if again != st {
				t.Error("there are two Streams of one stream")
			}
		},
	} {
		s.drv.Advance(time.Second)
		must(t, s.dev.Trim())
		engine.ForgetStreams(s.dev)
		if slices.Contains(engine.LiveStreams(s.dev), st) {
			t.Fatal("an idle stream was not forgotten")
		}
		// Others take the number.
		for range 3 {
			other := s.drv.NewStreamNonBlocking(0)
			o, err := s.dev.Stream(other)
			must(t, err)
			s.free(t, s.alloc(t, mib, o))
			must(t, s.drv.DestroyStream(0, other))
		}
		use()
	}
	must(t, s.a.Close())
}

// Per-thread default streams of threads that have ended leave nothing behind, and the GPU is waited for a few times only.
func TestThreadsThatEnd(t *testing.T) {
	for _, conf := range []string{"", "backend:malloc"} {
		t.Run(conf, func(t *testing.T) {
			s := newShortLived(t, conf, sim.CheckOrder)
			thread := uint64(0)
			s.drv.SetThread(func() uint64 { return thread })
			run := func(n int) map[string]int {
				for range n {
					thread++
					st, err := s.dev.Stream(cuda.StreamPerThread)
					must(t, err)
					shortWork["allocates"](s, cuda.StreamPerThread, st)
					s.drv.Advance(100 * time.Microsecond)
				}
				runtime.GC()
				return engine.Tables(s.dev)
			}
			const few = 1000
			before := run(few)
			s.drv.ResetCalls()
			after := run(3 * few)
			for name, n := range after {
				if n > before[name]+600 && name != "forgotten" { // the collector has run once
					t.Errorf("%s: %d entries after %d threads, %d after %d", name, before[name], few, n, 4*few)
				}
			}
			if n := s.drv.Calls().DeviceSyncs; n == 0 || n > 3*few/50 {
				t.Errorf("the device was waited for %d times; %v", n, after)
			}
		})
	}
}
