package engine_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/slow"
	"github.com/cistern-gpu/cistern/memory"
	"github.com/cistern-gpu/cistern/resource"
)

// What becomes of memory when the driver fails in the middle of a pause or a resume.

// pauseScenario plays all ways of pausing with blocks whose contents are known, over chunks, single handles and a user's
// resource. failing says which calls of the driver fail.
type pauseScenario struct {
	*pausing
	what   string
	keep   config.Keep
	fail   func(call string, n uint64) cuda.Code // nil: nothing fails
	calls  uint64                                // made by the engine while pausing, resuming and freeing
	broken bool                                  // the context is
	blocks map[cuda.Ptr]pausedBlock
	errs   []error
}

type pausedBlock struct {
	size uint64
	seed byte
	lost bool // its contents are not kept
}

func (s *pauseScenario) fatal(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf("%s: %s (errors: %v)", s.what, fmt.Sprintf(format, args...), s.errs)
}

// step does something that may fail.
func (s *pauseScenario) step(f func() error) error {
	s.drv.FailCall(func(call string, n uint64) cuda.Code {
		s.calls++
		if s.fail == nil {
			return cuda.Success
		}
		code := s.fail(call, s.calls)
		s.broken = s.broken || code.Poisons()
		return code
	})
	err := f()
	s.drv.FailCall(nil)
	if err != nil {
		s.errs = append(s.errs, err)
	}
	st := s.d.Views.Stats()
	if st.Reserved.All.Current+st.Paused.All.Current != st.ActiveBytes.All.Current+st.InactiveBytes.All.Current {
		s.fatal("reserved %d + paused %d, active %d + inactive %d", st.Reserved.All.Current, st.Paused.All.Current,
			st.ActiveBytes.All.Current, st.InactiveBytes.All.Current)
	}
	if fault := s.drv.Fault(); fault != nil && !s.broken {
		s.fatal("%v", fault)
	}
	return err
}

func (s *pauseScenario) put(pool *engine.Pool, size uint64, tag uint32) {
	p := s.alloc(pool, size, tag)
	seed := byte(len(s.blocks) + 1)
	s.fillEnds(p, size, seed)
	s.blocks[p] = pausedBlock{size, seed, false}
}

// Of large blocks the ends have contents: what lies between is one copy's or one file's with them.
func (s *pauseScenario) fillEnds(p cuda.Ptr, size uint64, seed byte) {
	n := min(size, 4*kib)
	s.fill(p, n, seed)
	s.fill(p+cuda.Ptr(size-n), n, seed)
}

func (s *pauseScenario) holdsEnds(p cuda.Ptr, size uint64, seed byte) {
	n := min(size, 4*kib)
	s.holds(p, n, seed)
	s.holds(p+cuda.Ptr(size-n), n, seed)
}

// verify looks at contents of what is not paused.
func (s *pauseScenario) verify() {
	s.t.Helper()
	if s.broken || s.d.Views.Stats().Paused.All.Current != 0 {
		return
	}
	for p, b := range s.blocks {
		if b.lost {
			s.fillEnds(p, b.size, b.seed)
			b.lost = false
			s.blocks[p] = b
		}
		s.holdsEnds(p, b.size, b.seed)
	}
}

func (s *pauseScenario) pauseAll(sel engine.Selection) {
	s.t.Helper()
	before := s.d.Views.Stats().Paused.All.Current
	err := s.step(func() error {
		_, err := s.d.Pause(sel, config.PauseOptions{Keep: s.keep, Dir: s.t.TempDir()})
		return err
	})
	if s.keep == config.KeepNone {
		for p, b := range s.blocks {
			b.lost = true
			s.blocks[p] = b
		}
	}
	if n := s.d.Views.Stats().Paused.All.Current; err != nil && n != before && !strings.Contains(err.Error(), "stays paused") && !s.broken {
		s.fatal("a pause failed; %d bytes were paused, %d are", before, n)
	}
	if err != nil {
		s.verify()
	}
}

// resumeAll resumes, and when that fails again, when nothing does.
func (s *pauseScenario) resumeAll() {
	s.t.Helper()
	for range 2 {
		before := s.d.Views.Stats().Paused.All.Current
		err := s.step(func() error { _, err := s.d.Resume(all); return err })
		after := s.d.Views.Stats().Paused.All.Current
		if err == nil && after != 0 || err != nil && after != before && !s.broken {
			s.fatal("resume: %v: %d bytes were paused, now %d", err, before, after)
		}
		if err == nil || s.broken {
			break
		}
		if errors.Is(err, cuda.ErrOutOfMemory) && !strings.Contains(err.Error(), "stays paused") {
			s.fatal("%v", err)
		}
		s.fail = nil
	}
	if !s.broken && s.d.Views.Stats().Paused.All.Current != 0 {
		s.fatal("nothing fails any more and all the same memory stays paused")
	}
	s.verify()
}

func (s *pauseScenario) play() {
	s.t.Helper()
	s.blocks = map[cuda.Ptr]pausedBlock{}
	single, err := s.d.NewPool(memory.PoolID{1, 0}, config.PoolOptions{Kind: config.PoolSingleHandle})
	if err != nil {
		s.fatal("%v", err)
	}
	own, err := resource.Segments(s.drv, 0)
	if err != nil {
		s.fatal("%v", err)
	}
	user, err := s.d.NewPool(memory.PoolID{2, 0}, config.PoolOptions{Upstream: own})
	if err != nil {
		s.fatal("%v", err)
	}
	for i := range 3 {
		s.put(nil, 2*mib+100*kib, 1+uint32(i%2))
		s.put(nil, 40*kib, 1)
		s.put(single, 300*kib, 2)
		s.put(user, 300*kib, 2)
	}
	s.free(s.alloc(nil, 2*mib, 0))
	s.pauseAll(all)
	s.freeOne()
	s.resumeAll()
	s.pauseAll(engine.Selection{Tag: 1})
	s.pauseAll(engine.Selection{Pool: user})
	if !s.broken {
		p := s.alloc(nil, 20*mib, 0)
		s.step(func() error { return s.a.Free(p) })
	}
	s.resumeAll()
	s.pauseAll(all)
	s.freeOne()
	s.step(func() error { return s.d.PauseBuffers(0) })
	s.resumeAll()
	s.step(func() error { return s.d.PauseBuffers(1 * mib) })
	s.pauseAll(all)
	for p := range s.blocks {
		s.step(func() error { return s.a.Free(p) })
		delete(s.blocks, p)
	}
	s.step(s.d.Trim)
	if s.broken {
		return
	}
	for _, p := range []*engine.Pool{single, user} {
		if err := p.Release(); err != nil {
			s.fatal("%v", err)
		}
	}
	if err := errors.Join(s.a.Trim(), s.a.Close()); err != nil {
		s.fatal("%v", err)
	}
	if err := func() error { _, err := own.Drain(); return err }(); err != nil {
		s.fatal("%v", err)
	}
	if l := s.drv.Leaks(); l != (sim.Live{}) {
		s.fatal("left in the driver: %+v", l)
	}
	s.checkHistory()
}

// checkHistory: in the history memory is mapped where none is, goes where there is some, and all goes in the end.
func (s *pauseScenario) checkHistory() {
	s.t.Helper()
	events, lost := s.d.History.Read()
	if lost > 0 || len(events) == 0 {
		s.fatal("%d events, %d lost", len(events), lost)
	}
	there := map[uint64]bool{}
	for i, e := range events {
		switch e.Kind {
		case event.SegmentAlloc, event.SegmentMap:
			if there[e.Addr] {
				s.fatal("event %d: %v at %#x, where memory is", i, e.Kind, e.Addr)
			}
			there[e.Addr] = true
		case event.SegmentFree: // perhaps of a segment whose memory is paused
			delete(there, e.Addr)
		case event.SegmentUnmap:
			if !there[e.Addr] {
				s.fatal("event %d: %v at %#x, where none is", i, e.Kind, e.Addr)
			}
			delete(there, e.Addr)
		}
	}
	if len(there) > 0 {
		s.fatal("the history ends with memory at %d addresses", len(there))
	}
}

// freeOne frees a block, the one with the lowest address: another one each time.
func (s *pauseScenario) freeOne() {
	var first cuda.Ptr
	for p := range s.blocks {
		if first == 0 || p < first {
			first = p
		}
	}
	err := s.step(func() error { return s.a.Free(first) })
	if errors.Is(err, memory.ErrUnknownPointer) {
		s.fatal("%v", err)
	}
	delete(s.blocks, first)
}

// TestPauseFailEveryCall fails each driver call once: alone, with one of three errors, or with the calls after it.
func TestPauseFailEveryCall(t *testing.T) {
	pauseFailEveryCall(t, uint64(quick(1, 7)), 3)
}

// TestSlowPauseFailEveryCall fails each driver call with two errors and with the calls after it.
func TestSlowPauseFailEveryCall(t *testing.T) {
	slow.Only(t)
	pauseFailEveryCall(t, 1, 1)
}

// failure is so many calls that fail.
type failure struct {
	calls uint64
	code  cuda.Code
}

// pauseFailEveryCall fails every step-th driver call, in one of so many ways.
func pauseFailEveryCall(t *testing.T, step, oneOf uint64) {
	// Memory of which the first is given up while the last is copied.
	defer engine.SetStretch(2 * mib)()
	for _, keep := range []config.Keep{config.KeepHost, config.KeepDisk, config.KeepNone} {
		run := func(what string, fail func(call string, n uint64) cuda.Code) uint64 {
			s := &pauseScenario{pausing: newPausing(t, sim.Options{}, config.Options{History: 1 << 16}), what: what, keep: keep, fail: fail}
			s.play()
			return s.calls
		}
		total := run(fmt.Sprintf("keep %d, nothing fails", keep), nil)
		if total < 100 {
			t.Fatalf("the scenario makes %d calls", total)
		}
		for k := uint64(1); k <= total; k += step {
			first := []cuda.Code{cuda.ErrOutOfMemory, cuda.ErrInvalidValue, cuda.ErrIllegalAddress}[k%2 : k%2+2]
			fails := []failure{{1, first[0]}, {1, first[1]}, {[]uint64{2, 3, 50}[k/oneOf%3], cuda.ErrInvalidValue}}
			for i, f := range fails {
				if (k+uint64(i))%oneOf != 0 {
					continue
				}
				run(fmt.Sprintf("keep %d, %d calls from %d of %d fail with %v", keep, f.calls, k, total, f.code), func(_ string, n uint64) cuda.Code {
					if n >= k && n < k+f.calls {
						return f.code
					}
					return cuda.Success
				})
			}
		}
		t.Logf("keep %d: %d calls", keep, total)
	}
}
