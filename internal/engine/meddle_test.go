package engine_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
)

// The scenario in which the driver fails, here with a second thread of the program instead: at every driver call of the
// first one it begins or ends a capture, ends a stream, frees a block, releases a pool, or pauses memory; now and then also
// where the first thread has unlocked something.
//
// Only one of the two threads runs at a time. The first one stands still at a driver call, and wherever it unlocks
// something, until the second one has finished or waits for a lock that is held. So a sequence is the same for a seed.

// meddler is the second thread.
type meddler struct {
	s     *scenario
	rng   *rand.Rand
	kinds []string
	first uintptr // the first thread's goroutine
	on    bool
	ended bool
	// under way: the second thread's goroutine, and a channel that is closed when it has finished; nil: it has
	second uintptr
	done   chan struct{}
	// looking is on while the first thread looks how far the second one is
	looking bool

	streams []*engine.Stream // that last
	blocks  []cuda.Ptr
	short   *ending
	capture *captured
	pool    *engine.Pool
	paused  *captured // with its pool's memory paused, or not
	pools   uint64
	seen    map[string]int
}

// ending is a stream that is destroyed soon, with the memory that was allocated on it.
type ending struct {
	st     *engine.Stream
	blocks []cuda.Ptr
}

// captured is a stream with its pool, of which a capture may be under way.
type captured struct {
	st      *engine.Stream
	pool    *engine.Pool
	durable bool
	begun   bool
	blocks  []cuda.Ptr
}

// goOn lets the second thread go on until it has finished or waits for what the first one holds.
func (m *meddler) goOn() {
	m.looking = true // also takes locks
	defer func() { m.looking = false }()
	for m.done != nil {
		select {
		case <-m.done:
			m.done = nil
		default:
			if lockrank.Blocked(m.second, m.first) || engine.CaptureBlocked(m.s.dev) {
				return
			}
			runtime.Gosched()
		}
	}
}

// meddle is called at the driver calls of any thread, and when one has unlocked something.
func (m *meddler) meddle(unlocked bool) {
	if lockrank.Goroutine() != m.first || !m.on || m.looking {
		return
	}
	if m.goOn(); m.done != nil || unlocked && m.rng.IntN(8) > 0 {
		return
	}
	kind := m.kinds[m.rng.IntN(len(m.kinds))]
	m.seen[kind]++
	started := make(chan uintptr)
	m.done = make(chan struct{})
	go func() {
		defer close(m.done)
		started <- lockrank.Goroutine()
		switch kind {
		case "capture":
			m.meddleCapture()
		case "stream":
			m.meddleStream()
		case "block":
			m.meddleBlock()
		case "pool":
			m.meddlePool()
		case "pause":
			m.meddlePause()
		}
	}()
	m.second = <-started
	if m.goOn(); m.done != nil {
		m.seen["blocked"]++
	}
}

// join waits until the second thread has finished; the first one holds nothing.
func (m *meddler) join() {
	if m.done != nil {
		<-m.done
		m.done = nil
	}
}

// newStream makes a stream of the driver's, and is nil where it cannot be made known.
func (m *meddler) newStream(o ...config.StreamOption) *engine.Stream {
	h := m.s.drv.NewStreamNonBlocking(0)
	st, err := m.s.dev.Stream(h, o...)
	if m.s.failed("stream", err) {
		m.s.drv.DestroyStream(0, h)
		return nil
	}
	return st
}

func (m *meddler) destroy(st *engine.Stream) {
	if err := m.s.drv.DestroyStream(0, st.Handle()); err != nil {
		m.s.t.Errorf("%s: DestroyStream: %v", m.s.what, err)
	}
}

// alloc is a block of the pool, nil is the default one; 0 where there is no memory.
func (m *meddler) alloc(p *engine.Pool, st *engine.Stream) cuda.Ptr {
	if p == nil {
		p = m.s.dev.DefaultPool()
	}
	n := uint64(512) << m.rng.IntN(15)
	return m.s.alloc(p, st, n+m.rng.Uint64N(n))
}

func (m *meddler) freeAll(blocks []cuda.Ptr) {
	for _, p := range blocks {
		m.s.free(p)
	}
}

func (m *meddler) meddleBlock() {
	if len(m.blocks) > 4 || len(m.blocks) > 0 && m.rng.IntN(2) == 0 {
		i := m.rng.IntN(len(m.blocks))
		p := m.blocks[i]
		m.blocks = append(m.blocks[:i], m.blocks[i+1:]...)
		if m.rng.IntN(3) == 0 {
			m.s.record(p, m.streams[m.rng.IntN(2)])
		}
		m.s.free(p)
		return
	}
	if p := m.alloc(nil, m.streams[m.rng.IntN(2)]); p != 0 {
		m.blocks = append(m.blocks, p)
	}
}

// meddleStream has a stream come or, with all its memory given back, go.
func (m *meddler) meddleStream() {
	if m.short == nil {
		st := m.newStream()
		if st == nil {
			return
		}
		x := &ending{st: st}
		for range 1 + m.rng.IntN(3) {
			if p := m.alloc(nil, st); p != 0 {
				x.blocks = append(x.blocks, p)
			}
		}
		m.short = x
		return
	}
	x := m.short
	m.short = nil
	m.freeAll(x.blocks)
	m.destroy(x.st)
}

// meddleCapture begins or ends a capture; what it allocated is given back in this one or the next, or when its pool is released.
func (m *meddler) meddleCapture() {
	s := m.s
	if m.capture == nil {
		durable := m.rng.IntN(2) == 0
		var o []config.StreamOption
		if durable {
			o = append(o, config.StreamDurable)
		}
		st := m.newStream(o...)
		if st == nil {
			return
		}
		m.pools++
		p, err := s.dev.NewPool(memory.PoolID{8, m.pools}, config.PoolOptions{})
		if s.failed("new pool", err) {
			s.streams = append(s.streams, st.Handle())
			return
		}
		m.capture = &captured{st: st, pool: p, durable: durable}
	}
	c := m.capture
	if c.begun {
		if m.rng.IntN(2) == 0 {
			m.inCapture(c)
			return
		}
		m.endCapture(c)
		if m.rng.IntN(3) == 0 {
			m.endCaptured(c)
			m.capture = nil
		}
		return
	}
	err := s.dev.Captures.Begin(c.st, c.pool)
	if s.failed("begin capture", err) {
		return
	}
	if err := s.drv.BeginCapture(0, c.st.Handle()); err != nil {
		s.t.Errorf("%s: cuStreamBeginCapture: %v", s.what, err)
	}
	c.begun = true
	m.inCapture(c)
}

func (m *meddler) inCapture(c *captured) {
	if len(c.blocks) > 0 && m.rng.IntN(2) == 0 {
		m.s.free(c.blocks[0])
		c.blocks = c.blocks[1:]
	} else if p := m.alloc(c.pool, c.st); p != 0 {
		c.blocks = append(c.blocks, p)
	}
}

func (m *meddler) endCapture(c *captured) {
	s := m.s
	g, err := s.drv.EndCapture(0, c.st.Handle())
	if err != nil {
		s.t.Errorf("%s: the capture was spoilt: %v", s.what, err)
	}
	s.failed("end capture", s.dev.Captures.End(c.st))
	c.begun = false
	if err == nil {
		if err := g.Launch(0, c.st.Handle()); err != nil {
			s.t.Errorf("%s: graph launch: %v", s.what, err)
		}
	}
	m.seen["captured"]++
}

// endCaptured ends the life of a graph's memory, which the engine may still wait for.
func (m *meddler) endCaptured(c *captured) {
	m.freeAll(c.blocks)
	m.s.failed("release", c.pool.Release())
	if c.durable {
		m.s.streams = append(m.s.streams, c.st.Handle())
		return
	}
	m.destroy(c.st)
}

// meddlePool makes a pool with a block, or releases it before or after the block is given back.
func (m *meddler) meddlePool() {
	s := m.s
	if m.pool == nil {
		m.pools++
		o := config.PoolOptions{Kind: config.PoolKind(m.rng.IntN(3))}
		if m.rng.IntN(4) == 0 {
			o.Limit = uint64(1+m.rng.IntN(20)) * mib
		}
		p, err := s.dev.NewPool(memory.PoolID{9, m.pools}, o)
		if s.failed("new pool", err) {
			return
		}
		m.pool = p
		return
	}
	p := m.pool
	m.pool = nil
	b := m.alloc(p, m.streams[m.rng.IntN(2)])
	early := m.rng.IntN(2) == 0
	if early {
		s.failed("release", p.Release())
	}
	s.free(b)
	if !early {
		s.failed("release", p.Release())
	}
}

// meddlePause pauses a pool with a block, or resumes it or frees the block.
func (m *meddler) meddlePause() {
	s := m.s
	if m.paused == nil {
		m.pools++
		p, err := s.dev.NewPool(memory.PoolID{10, m.pools}, config.PoolOptions{})
		if !s.failed("new pool", err) {
			m.paused = &captured{pool: p, st: m.streams[0]}
		}
		return
	}
	x := m.paused
	sel := engine.Selection{Pool: x.pool}
	var refused *memory.PauseError
	switch {
	case len(x.blocks) == 0:
		if p := m.alloc(x.pool, x.st); p != 0 {
			x.blocks = append(x.blocks, p)
		}
	case !x.begun:
		_, err := s.dev.Pause(sel, config.PauseOptions{Keep: []config.Keep{config.KeepHost, config.KeepNone}[m.rng.IntN(2)]})
		if x.begun = err == nil; x.begun {
			m.seen["paused"]++
		} else if !errors.As(err, &refused) { // as a capture is under way
			s.failed("pause", err)
		}
	case m.rng.IntN(2) == 0:
		_, err := s.dev.Resume(sel)
		x.begun = s.failed("resume", err)
	default:
		m.freeAll(x.blocks)
		x.blocks, x.begun = nil, false
	}
}

// end gives everything back.
func (m *meddler) end() {
	m.join()
	m.on, m.ended = false, true
	if c := m.capture; c != nil {
		if c.begun {
			m.endCapture(c)
		}
		m.endCaptured(c)
	}
	if m.short != nil {
		m.freeAll(m.short.blocks)
		m.destroy(m.short.st)
	}
	if m.pool != nil {
		m.s.failed("release", m.pool.Release())
	}
	if m.paused != nil {
		m.freeAll(m.paused.blocks)
		m.s.failed("release", m.paused.pool.Release())
	}
	m.freeAll(m.blocks)
	for _, st := range m.streams {
		m.s.streams = append(m.s.streams, st.Handle())
	}
}

// meddled plays the scenario with a second thread, and returns how often that did what.
func meddled(t *testing.T, opts config.Options, seed uint64, kinds ...string) map[string]int {
	if !lockrank.Checking() {
		t.Skip("ranks of locks are not checked in runs of benchmarks, and without them waiting threads are not known")
	}
	what := fmt.Sprintf("CISTERN_SEED=%d, %v, %s", seed, kinds, opts)
	s := newScenario(t, what, func(err error) { t.Errorf("%s: %v", what, err) })
	m := &meddler{s: s, rng: rand.New(rand.NewPCG(seed, 5)), kinds: kinds, first: lockrank.Goroutine(), seen: map[string]int{}}
	s.seen = func(drv cuda.Driver) cuda.Driver {
		return &interposed{Driver: drv, before: func(string, cuda.Device) { m.meddle(false) }}
	}
	s.alone = func() (done func()) {
		m.join()
		m.on = false
		return func() {
			if m.streams == nil {
				m.streams = []*engine.Stream{m.newStream(config.StreamDurable), m.newStream()}
			}
			m.on = !m.ended
		}
	}
	lockrank.OnUnlock(func() { m.meddle(true) })
	defer lockrank.OnUnlock(nil)
	s.ending = m.end
	s.play(opts)
	s.end()
	for _, err := range s.errs {
		if !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("%s: %v", s.what, err)
		}
	}
	return m.seen
}

var meddledOptions = []string{"", "chunk:2MiB,cross_stream:ready", "backend:malloc", "single_handle:true", "history:100"}

// At every driver call of a long scenario another thread does one thing.
func TestMeddledWith(t *testing.T) {
	for _, kind := range []string{"capture", "stream", "block", "pool", "pause"} {
		t.Run(kind, func(t *testing.T) {
			for _, text := range meddledOptions {
				opts, err := config.Parse(text)
				must(t, err)
				seen := meddled(t, opts, 1, kind)
				t.Logf("%q: %v", text, seen)
				if seen[kind] < 50 || seen["blocked"] == 0 {
					t.Errorf("%q: %v: the second thread hardly meddled", text, seen)
				}
			}
		})
	}
}

// At every driver call another thread does something.
func TestMeddledRandom(t *testing.T) {
	for seed := range seeds(t, quick(3, 1), nil, nil) {
		for _, text := range meddledOptions {
			opts, err := config.Parse(text)
			must(t, err)
			meddled(t, opts, seed, "capture", "stream", "block", "pool", "pause")
		}
	}
}
