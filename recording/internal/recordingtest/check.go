// Package recordingtest has what the tests of several formats need: recordings that are made up, and checks of what was
// read. It is for tests only.
package recordingtest

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/cputime"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/open"
)

// PeakHeap runs f and returns the largest heap (live and not yet collected) that was seen beyond what was there
// before, sampled every 200 us.
func PeakHeap(f func()) uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before, peak := m.HeapInuse, m.HeapInuse
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-quit:
				return
			case <-time.After(200 * time.Microsecond):
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				peak = max(peak, m.HeapInuse)
			}
		}
	}()
	f()
	close(quit)
	<-done
	runtime.ReadMemStats(&m)
	return max(peak, m.HeapInuse) - before
}

// mostFactor is the largest number of bytes that a reader may hold for each byte of a file: that of package native.
const mostFactor = 30

// Refused checks that a bad file is refused in one line that names it, the place and what was expected, in bounded
// memory and time.
func Refused(t *testing.T, file []byte, want string) {
	t.Helper()
	if msg := Refusal(t, file); !strings.Contains(msg, want) {
		t.Errorf("got %q; expected it to say %q", msg, want)
	}
}

// Refusal is what a bad file is refused with.
func Refusal(t *testing.T, file []byte) string {
	t.Helper()
	var err error
	start := cputime.Process()
	peak := PeakHeap(func() { _, err = open.Read(bytes.NewReader(file), "some.file") })
	// The bound of package input, and as much again for what the collector has not taken yet.
	if limit := uint64(2 * (input.MemoryBase + 8<<20 + mostFactor*len(file))); peak > limit {
		t.Errorf("%d bytes of memory for a file of %d", peak, len(file))
	}
	if d := cputime.Process() - start; d > 20*time.Second {
		t.Errorf("it took %s of the processor", d)
	}
	if err == nil {
		t.Fatal("read without an error")
	}
	var e *recording.Error
	if !errors.As(err, &e) || e.Path != "some.file" {
		t.Fatalf("%T %v; expected an *Error that names the file", err, err)
	}
	if msg := err.Error(); strings.ContainsAny(msg, "\n\r") || !strings.HasPrefix(msg, "some.file: ") || len(msg) > 400 {
		t.Fatalf("%q; expected one line that begins with the file's name", msg)
	}
	return err.Error()
}

// Check asserts what every Trace promises.
func Check(t testing.TB, tr *recording.Trace) {
	t.Helper()
	if len(tr.Stacks) == 0 || len(tr.Stacks[0]) != 0 || len(tr.Pools) == 0 || tr.Pools[0] != (recording.PoolID{}) {
		t.Fatalf("no empty stack or default pool: %v %v", tr.Stacks, tr.Pools)
	}
	for _, s := range tr.Stacks {
		for _, f := range s {
			if int(f) >= len(tr.Frames) {
				t.Fatalf("frame %d of %d", f, len(tr.Frames))
			}
		}
	}
	ref := func(stream, pool, stack uint32) {
		if int(stream) >= len(tr.Streams) || int(pool) >= len(tr.Pools) || int(stack) >= len(tr.Stacks) {
			t.Fatalf("stream %d of %d, pool %d of %d, stack %d of %d", stream, len(tr.Streams), pool, len(tr.Pools), stack,
				len(tr.Stacks))
		}
	}
	for i := range tr.Events {
		e := &tr.Events[i]
		ref(e.Stream, e.Pool, e.Stack)
		if e.Kind >= event.NumKinds {
			t.Fatalf("event %d of kind %d", i, e.Kind)
		}
	}
	for _, segs := range [][]recording.Segment{tr.InitialSegments, tr.Final} {
		for i := range segs {
			ref(segs[i].Stream, segs[i].Pool, segs[i].Stack)
			// Cistern's own files are taken at their word: spare chunks, which lie nowhere, are all at 0.
			if tr.Format != recording.FormatCistern && i > 0 && segs[i].Addr-segs[i-1].Addr < segs[i-1].Size {
				t.Fatalf("segments overlap: %+v %+v", segs[i-1], segs[i])
			}
			for _, b := range segs[i].Blocks {
				ref(b.Stream, b.Pool, b.Stack)
			}
		}
	}
	for i, b := range tr.Initial {
		ref(b.Stream, b.Pool, b.Stack)
		if tr.Format != recording.FormatCistern && i > 0 && b.Addr <= tr.Initial[i-1].Addr {
			t.Fatalf("initial blocks out of order: %+v %+v", tr.Initial[i-1], b)
		}
	}
	tr.PeakLive()
	tr.RecordedPeakReserved()
	if tr.Duration() < 0 {
		t.Fatal("a negative duration")
	}
}

// Says checks that the notes of a trace say all of want.
func Says(t *testing.T, tr *recording.Trace, want ...string) {
	t.Helper()
	all := strings.Join(tr.Notes, "; ")
	for _, w := range want {
		if !strings.Contains(all, w) {
			t.Errorf("notes %q; expected %q", all, w)
		}
	}
}
