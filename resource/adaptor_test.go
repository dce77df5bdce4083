package resource_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
	"github.com/cistern-gpu/cistern/replay"
	"github.com/cistern-gpu/cistern/resource"
)

func device(t *testing.T) (*sim.Driver, resource.Resource) {
	t.Helper()
	d := sim.New(sim.Options{Capacity: 1 << 30, Handles: sim.Exportable})
	if err := d.RetainContext(0); err != nil {
		t.Fatal(err)
	}
	return d, resource.Device(d, 0)
}

func alloc(t *testing.T, r resource.Resource, size uint64) cuda.Ptr {
	t.Helper()
	p, err := r.Alloc(size, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// must stops the test on an error.
var must = testkit.Must

// The counters as in RMM's own documentation of push_counters and pop_counters.
func TestStatistics(t *testing.T) {
	_, up := device(t)
	s := resource.Statistics(up)
	a := alloc(t, s, 1000)
	b := alloc(t, s, 500)
	must(t, s.Free(a, 1000, 0, 0))
	want := resource.Counters{Bytes: resource.Counter{Current: 500, Peak: 1500, Total: 1500},
		Allocations: resource.Counter{Current: 1, Peak: 2, Total: 2}}
	if got := s.Counters(); got != want {
		t.Errorf("%+v; want %+v", got, want)
	}
	if got := s.Push(); got != want {
		t.Errorf("Push returns %+v; want %+v", got, want)
	}
	if got := s.Counters(); got != (resource.Counters{}) {
		t.Errorf("a section starts with %+v", got)
	}
	c := alloc(t, s, 2000)
	must(t, s.Free(c, 2000, 0, 0))
	must(t, s.Free(b, 500, 0, 0)) // from before
	s.Push()
	d := alloc(t, s, 10)
	inner, err := s.Pop()
	if want := (resource.Counters{Bytes: resource.Counter{Current: 10, Peak: 10, Total: 10},
		Allocations: resource.Counter{Current: 1, Peak: 1, Total: 1}}); err != nil || inner != want {
		t.Errorf("the innermost section: %+v, %v; want %+v", inner, err, want)
	}
	outer, err := s.Pop()
	if want := (resource.Counters{Bytes: resource.Counter{Current: -490, Peak: 2000, Total: 2010},
		Allocations: resource.Counter{Current: 0, Peak: 1, Total: 2}}); err != nil || outer != want {
		t.Errorf("the section: %+v, %v; want %+v", outer, err, want)
	}
	if want := (resource.Counters{Bytes: resource.Counter{Current: 10, Peak: 2500, Total: 3510},
		Allocations: resource.Counter{Current: 1, Peak: 2, Total: 4}}); s.Counters() != want {
		t.Errorf("in the end: %+v; want %+v", s.Counters(), want)
	}
	if _, err := s.Pop(); err == nil {
		t.Error("Pop outside of any section")
	}
	before := s.Counters()
	if _, err := s.Alloc(1<<50, 0, 0); err == nil || s.Counters() != before {
		t.Errorf("a request that failed was counted: %v, %+v", err, s.Counters())
	}
	alloc(t, s, 0)
	must(t, s.Free(0, 0, 0, 0))
	if s.Counters() != before {
		t.Errorf("no bytes were counted: %+v", s.Counters())
	}
	must(t, s.Free(d, 10, 0, 0))
}

// Counting is exact with many threads.
func TestStatisticsThreads(t *testing.T) {
	_, up := device(t)
	s := resource.Statistics(resource.Limiting(up, 4<<20))
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 200 {
				if p, err := s.Alloc(1<<20, 0, 0); err == nil {
					if err := s.Free(p, 1<<20, 0, 0); err != nil {
						t.Error(err)
					}
				} else if !errors.Is(err, cuda.ErrOutOfMemory) {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	c := s.Counters()
	if c.Bytes.Current != 0 || c.Bytes.Peak > 4<<20 || c.Bytes.Total != c.Allocations.Total<<20 || c.Allocations.Peak > 4 {
		t.Errorf("%+v", c)
	}
}

// RMM: sizes count padded; a request beyond the limit does not reach the upstream.
func TestLimiting(t *testing.T) {
	d, up := device(t)
	asked := resource.Statistics(up)
	l := resource.Limiting(asked, 1024)
	p := alloc(t, l, 1)
	if l.Allocated() != 256 || l.Limit() != 1024 {
		t.Errorf("one byte counts as %d of %d", l.Allocated(), l.Limit())
	}
	q := alloc(t, l, 513)
	var e *resource.LimitError
	if _, err := l.Alloc(1, 0, 0); !errors.As(err, &e) || !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("beyond the limit: %v", err)
	} else if e.Allocated != 1024 || e.Size != 1 || e.Limit != 1024 {
		t.Errorf("%+v", e)
	}
	if n := asked.Counters().Allocations.Total; n != 2 {
		t.Errorf("the upstream was asked %d times", n)
	}
	if free, total, err := l.MemInfo(); free != 0 || total != 1024 || err != nil {
		t.Errorf("memory info: %d of %d, %v", free, total, err)
	}
	must(t, l.Free(q, 513, 0, 0))
	if free, _, _ := l.MemInfo(); free != 768 {
		t.Errorf("%d bytes free", free)
	}
	for _, size := range []uint64{769, math.MaxUint64, math.MaxUint64 - 255} {
		if _, err := l.Alloc(size, 0, 0); !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	// What fails below does not count.
	d.FailCall(func(string, uint64) cuda.Code { return cuda.ErrNotPermitted })
	if _, err := l.Alloc(8, 0, 0); !errors.Is(err, cuda.ErrNotPermitted) {
		t.Error(err)
	}
	if err := l.Free(p, 1, 0, 0); !errors.Is(err, cuda.ErrNotPermitted) || l.Allocated() != 256 {
		t.Errorf("%v, %d allocated", err, l.Allocated())
	}
	d.FailCall(nil)
	q = alloc(t, l, 768)
	must(t, l.Free(q, 768, 0, 0))
	must(t, l.Free(p, 1, 0, 0))
	if l.Allocated() != 0 {
		t.Errorf("%d allocated", l.Allocated())
	}
}

// The log is RMM's, row for row, and the reader of recorded runs reads it.
func TestLogging(t *testing.T) {
	d, up := device(t)
	var out bytes.Buffer
	l := resource.Logging(up, &out)
	s := d.NewStream(0)
	p, err := l.Alloc(1024, 0, s)
	must(t, err)
	q, err := l.Alloc(3<<20, 0, 0)
	must(t, err)
	if _, err := l.Alloc(1<<40, 0, s); err == nil {
		t.Error("1 TiB")
	}
	d.FailCall(func(string, uint64) cuda.Code { return cuda.ErrNotPermitted })
	if l.Free(p, 1024, 0, s) == nil {
		t.Error("a free that fails")
	}
	d.FailCall(nil)
	must(t, l.Free(p, 1024, 0, s))
	must(t, resource.Close(l))
	must(t, l.Free(q, 3<<20, 0, 0)) // memory goes on without the log

	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	want := []string{"Thread,Time,Action,Pointer,Size,Stream",
		fmt.Sprintf("allocate,%#x,1024,%#x", uint64(p), uint64(s)),
		fmt.Sprintf("allocate,%#x,3145728,0x0", uint64(q)),
		fmt.Sprintf("allocate failure,(nil),1099511627776,%#x", uint64(s)),
		fmt.Sprintf("free,%#x,1024,%#x", uint64(p), uint64(s)),
		fmt.Sprintf("allocate,%#x,1024,%#x", uint64(p), uint64(s)), // it could not be freed
		fmt.Sprintf("free,%#x,1024,%#x", uint64(p), uint64(s))}
	if len(lines) != len(want) {
		t.Fatalf("%d lines:\n%s", len(lines), out.String())
	}
	row := regexp.MustCompile(`^\d+,\d\d:\d\d:\d\d\.\d{6},(.*)$`)
	for i, line := range lines {
		if i > 0 {
			m := row.FindStringSubmatch(line)
			if m == nil {
				t.Fatalf("row %q", line)
			}
			line = m[1]
		}
		if line != want[i] {
			t.Errorf("line %d is %q; want %q", i, line, want[i])
		}
	}

	f, err := open.Read(bytes.NewReader(out.Bytes()), "log.csv")
	must(t, err)
	tr := f.Traces[0]
	if f.Format != recording.FormatRMM || tr.RecordedOOMs() != 1 {
		t.Errorf("read as %s with %d failures", f.Format, tr.RecordedOOMs())
	}
	var kinds []event.Kind
	for _, e := range tr.Events {
		kinds = append(kinds, e.Kind)
	}
	if live, _ := tr.PeakLive(); live != 1024+3<<20 {
		t.Errorf("peak of %d bytes, events %v", live, kinds)
	}
	// And a replay of it runs.
	res, err := replay.NewPlan(tr).Run(replay.Spec{Name: "direct"}, replay.Options{})
	must(t, err)
	if res.PeakLive != 1024+3<<20 {
		t.Errorf("replayed, the peak is %d", res.PeakLive)
	}
}

// A log that cannot be written says so when it is closed, and memory goes on.
func TestLoggingFails(t *testing.T) {
	_, up := device(t)
	w := &failing{rows: 2}
	l := resource.Logging(up, w)
	p, q := alloc(t, l, 8), alloc(t, l, 8)
	must(t, l.Free(p, 8, 0, 0))
	must(t, l.Free(q, 8, 0, 0))
	if w.written != 3 {
		t.Errorf("%d writes; the third one fails, and none comes after it", w.written)
	}
	if err := resource.Close(l); err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Errorf("closed: %v", err)
	}
	must(t, resource.Close(l))
}

type failing struct{ rows, written int }

func (f *failing) Write(b []byte) (int, error) {
	if f.written++; f.written > f.rows {
		return 0, errors.New("disk full")
	}
	return len(b), nil
}

// What is out is known with its stack; what is not out cannot be freed.
func TestTracking(t *testing.T) {
	d, up := device(t)
	r := resource.Tracking(up, true)
	p, q := alloc(t, r, 100), alloc(t, r, 200)
	if r.Allocated() != 300 {
		t.Errorf("%d bytes out", r.Allocated())
	}
	list := r.Outstanding()
	if len(list) != 2 || list[0].Ptr != p || list[1].Ptr != q || list[0].Size != 100 ||
		!strings.Contains(list[0].Stack, "TestTracking") || !strings.HasPrefix(list[0].Stack, "github.com/cistern-gpu/cistern/resource_test.alloc ") {
		t.Errorf("%+v", list)
	}
	if text := r.String(); strings.Count(text, "bytes, stream") != 2 || !strings.Contains(text, "adaptor_test.go:") {
		t.Errorf("listed as\n%s", text)
	}
	refused := func(reason, words string, p cuda.Ptr, size uint64) {
		t.Helper()
		calls := d.Calls().Count
		err := r.Free(p, size, 0, 0)
		var e *resource.FreeError
		if !errors.As(err, &e) || e.Reason != reason || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", reason, err)
		}
		if d.Calls().Count != calls {
			t.Errorf("%s: the upstream was asked", reason)
		}
	}
	refused("wrong size", "it was allocated with 100); allocated at ", p, 101)
	refused("unknown pointer", "unknown pointer", p+8, 100)
	must(t, r.Free(p, 100, 0, 0))
	refused("double free", "freed at github.com/cistern-gpu/cistern/resource_test.TestTracking ", p, 100)
	if alloc(t, r, 100) != p {
		t.Fatal("the simulated device gives out an address again")
	}
	must(t, r.Free(p, 100, 0, 0))
	// A free that fails can be made again.
	d.FailCall(func(string, uint64) cuda.Code { return cuda.ErrNotPermitted })
	if err := r.Free(q, 200, 0, 0); !errors.Is(err, cuda.ErrNotPermitted) || r.Allocated() != 200 {
		t.Errorf("%v, %d out", err, r.Allocated())
	}
	d.FailCall(nil)
	must(t, r.Free(q, 200, 0, 0))
	must(t, r.Free(0, 0, 0, 0))
	if len(r.Outstanding()) != 0 || r.Allocated() != 0 {
		t.Errorf("%v", r.Outstanding())
	}
}

// RMM: the callback gets the size, and the request is tried again while it says so; other failures pass.
func TestOnFailure(t *testing.T) {
	d, up := device(t)
	l := resource.Limiting(up, 1<<20)
	cached := alloc(t, l, 1<<20)
	var asked []uint64
	r := resource.OnFailure(l, func(need uint64) bool {
		asked = append(asked, need)
		if cached != 0 {
			must(t, l.Free(cached, 1<<20, 0, 0))
			cached = 0
			return true
		}
		return len(asked) < 4
	})
	p := alloc(t, r, 1000)
	if fmt.Sprint(asked) != "[1000]" {
		t.Errorf("asked for %v", asked)
	}
	if _, err := r.Alloc(2<<20, 0, 0); !errors.Is(err, cuda.ErrOutOfMemory) || len(asked) != 4 {
		t.Errorf("%v after %v", err, asked)
	}
	d.FailCall(func(string, uint64) cuda.Code { return cuda.ErrNotPermitted })
	if _, err := r.Alloc(8, 0, 0); !errors.Is(err, cuda.ErrNotPermitted) || len(asked) != 4 {
		t.Errorf("%v after %v", err, asked)
	}
	d.FailCall(nil)
	must(t, r.Free(p, 1000, 0, 0))
}

// RMM: what is at least as large as the threshold is aligned, and the upstream is asked for so much more.
func TestAlignment(t *testing.T) {
	_, up := device(t)
	s := resource.Statistics(up)
	if _, err := resource.Alignment(s, 3000, 0); !errors.Is(err, resource.ErrAlign) {
		t.Error(err)
	}
	a, err := resource.Alignment(s, 4096, 65536)
	must(t, err)
	small, large := alloc(t, a, 100), alloc(t, a, 65536)
	if uint64(large)%4096 != 0 {
		t.Errorf("aligned to %#x", uint64(large))
	}
	if got := s.Counters().Bytes.Current; got != 100+65536+4096-512 {
		t.Errorf("the upstream was asked for %d bytes", got)
	}
	if a.Traits().Align != 512 {
		t.Errorf("small ones are not aligned to %d", a.Traits().Align)
	}
	q, err := a.Alloc(100, 1<<20, 0)
	must(t, err)
	if uint64(q)%(1<<20) != 0 {
		t.Errorf("aligned to %#x", uint64(q))
	}
	must(t, a.Free(q, 100, 1<<20, 0))
	must(t, a.Free(small, 100, 0, 0))
	must(t, a.Free(large, 65536, 0, 0))
	if s.Counters().Bytes.Current != 0 {
		t.Errorf("%+v", s.Counters())
	}
}

// An interface is found through adaptors, but not through those whose addresses are others.
func TestAs(t *testing.T) {
	d, up := device(t)
	v, err := resource.Segments(d, 0)
	must(t, err)
	deep := resource.Statistics(resource.Tracking(resource.Limiting(v, 1<<30), false))
	if b, ok := resource.As[resource.Backing](deep); !ok || b != resource.Backing(v) {
		t.Errorf("the segments are not found: %v, %v", b, ok)
	}
	if _, ok := resource.As[*resource.LimitingAdaptor](deep); !ok {
		t.Error("an adaptor is not found by its type")
	}
	over := func(r resource.Resource) resource.Resource {
		a, err := resource.Alignment(r, 8<<20, 0)
		must(t, err)
		return resource.Statistics(a)
	}
	if b, ok := resource.As[resource.Backing](over(v)); !ok || b == resource.Backing(v) {
		t.Errorf("%T: its addresses are not the adaptor's", b)
	}
	if b, ok := resource.As[resource.Backing](over(up)); ok {
		t.Errorf("%T has no backing", b)
	}
	if _, ok := resource.As[*resource.AlignmentAdaptor](over(up)); !ok {
		t.Error("an adaptor is not found by its type")
	}
	if _, ok := resource.As[resource.Backing](resource.Fallback(up, up)); ok {
		t.Error("neither has a backing")
	}
	if _, ok := resource.As[resource.Backing](resource.Fallback(up, v)); !ok {
		t.Error("one has a backing")
	}
	if _, ok := resource.As[resource.Peers](nil); ok {
		t.Error("nothing is something")
	}
}

// Each goes back to where it came from, and only want of memory makes the second one asked.
func TestFallback(t *testing.T) {
	d, up := device(t)
	first, second := resource.Statistics(resource.Limiting(up, 1100)), resource.Statistics(resource.Limiting(up, 2000))
	f := resource.Fallback(first, second)
	p, q := alloc(t, f, 700), alloc(t, f, 700)
	if a, b := first.Counters().Bytes.Current, second.Counters().Bytes.Current; a != 700 || b != 700 {
		t.Errorf("%d and %d bytes", a, b)
	}
	if _, err := f.Alloc(5000, 0, 0); !errors.Is(err, cuda.ErrOutOfMemory) || strings.Contains(err.Error(), "\n") {
		t.Error(err)
	}
	d.FailCall(func(string, uint64) cuda.Code { return cuda.ErrNotPermitted })
	if _, err := f.Alloc(8, 0, 0); errors.Is(err, cuda.ErrOutOfMemory) || err == nil {
		t.Error(err)
	}
	if err := f.Free(q, 700, 0, 0); err == nil {
		t.Error("a free that fails")
	}
	d.FailCall(nil)
	must(t, f.Free(p, 700, 0, 0))
	must(t, f.Free(q, 700, 0, 0))
	if a, b := first.Counters().Bytes.Current, second.Counters().Bytes.Current; a != 0 || b != 0 {
		t.Errorf("%d and %d bytes are left", a, b)
	}
}

// A result that is not aligned is given back; null is out of memory.
func TestExternal(t *testing.T) {
	var freed []cuda.Ptr
	next := cuda.Ptr(0)
	o := resource.ExternalOptions{Alloc: func(size, _ uint64, _ cuda.Stream) (cuda.Ptr, error) { return next, nil },
		Free: func(p cuda.Ptr, _, _ uint64, _ cuda.Stream) error { freed = append(freed, p); return nil }}
	r, err := resource.External(o)
	must(t, err)
	if _, err := r.Alloc(8, 0, 0); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Error(err)
	}
	next = 0x1080
	if p, err := r.Alloc(8, 0, 0); !errors.Is(err, resource.ErrAlign) || p != 0 || fmt.Sprint(freed) != "[4224]" {
		t.Errorf("%#x, %v, freed %v", uint64(p), err, freed)
	}
	next = 0x1100
	if p, err := r.Alloc(8, 0, 0); err != nil || p != next {
		t.Errorf("%#x, %v", uint64(p), err)
	}
	if _, _, err := r.MemInfo(); err == nil {
		t.Error("it is not known")
	}
	if _, err := resource.External(resource.ExternalOptions{Alloc: o.Alloc}); err == nil {
		t.Error("nothing frees")
	}
}

// Requests name a stream that is being captured, or is gone: neither reaches the pool, and memory is back when Free
// returns.
func TestHostOrdered(t *testing.T) {
	d := sim.New(sim.Options{Capacity: 1 << 30, Handles: sim.Exportable, Check: sim.CheckOrder, RealTime: true})
	must(t, d.RetainContext(0))
	a, err := resource.Async(d, 0, resource.AsyncOptions{})
	must(t, err)
	r, err := resource.HostOrdered(d, a)
	must(t, err)
	plain := resource.Device(d, 0)
	if same, err := resource.HostOrdered(d, plain); same != plain || err != nil {
		t.Errorf("%T, %v: what is host-ordered needs no adaptor", same, err)
	}
	if r.Traits().StreamOrdered || !a.Traits().StreamOrdered {
		t.Errorf("%+v over %+v", r.Traits(), a.Traits())
	}
	s := d.NewStreamNonBlocking(0)
	must(t, d.BeginCapture(0, s))
	for _, st := range []cuda.Stream{s, 12345} {
		p, err := r.Alloc(40<<20, 0, st)
		must(t, err)
		other := d.NewStreamNonBlocking(0)
		must(t, d.Use(0, other, p, 40<<20)) // on any stream at once
		must(t, d.StreamSynchronize(0, other))
		must(t, d.DestroyStream(0, other))
		must(t, r.Free(p, 40<<20, 0, st))
		if reserved, used, err := a.Usage(); reserved != 0 || used != 0 || err != nil {
			t.Errorf("%d bytes are held, %d used, %v", reserved, used, err)
		}
	}
	if status, _, err := d.StreamCapture(0, s); status != cuda.CaptureActive || err != nil {
		t.Errorf("the capture is %v, %v", status, err)
	}
	must(t, resource.Close(r))
	must(t, resource.Close(r)) // again
	must(t, d.Fault())
}

// Managed memory is moved once when it is handed out; other memory has no need of it.
func TestPrefetch(t *testing.T) {
	d, plain := device(t)
	if _, err := resource.Prefetch(plain, d); err == nil {
		t.Error("cuMemAlloc's memory does not migrate")
	}
	r, err := resource.Prefetch(resource.Limiting(resource.Managed(d, 0), 1<<20), d)
	must(t, err)
	p := alloc(t, r, 1000)
	if n := d.Calls().Calls["cuMemPrefetchAsync"].Count; n != 1 {
		t.Errorf("moved %d times", n)
	}
	must(t, r.Free(p, 1000, 0, 0))
	// What cannot be moved is not handed out, nor lost.
	d.FailCall(func(call string, _ uint64) cuda.Code {
		if call == "cuMemPrefetchAsync" || call == "cuMemFree" {
			return cuda.ErrNotPermitted
		}
		return cuda.Success
	})
	if p, err := r.Alloc(1000, 0, 0); p != 0 || !errors.Is(err, cuda.ErrNotPermitted) {
		t.Errorf("%#x, %v", uint64(p), err)
	}
	d.FailCall(nil)
	must(t, resource.Close(r))
	if l := d.Leaks(); l.Managed != 0 {
		t.Errorf("left: %+v", l)
	}
}
