package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// streams is how many streams the program has at any time.
const streams = 8

// block is one allocation. The pattern of its seed was last written on the stream writer.
type block struct {
	p       cuda.Ptr
	size    uint64
	seed    uint64
	owner   *stream
	writer  *stream
	private bool // of the worker's private pool
}

type stream struct {
	handle cuda.Stream
	st     cistern.Stream
	lasts  bool // it is not destroyed while the allocator is in use, so other workers may use it
}

// worker is one thread of the program. It works on its own streams, gives blocks to others' streams to read or write,
// and puts blocks into a common place where any worker takes them out to free.
type worker struct {
	m      gpu.Machine
	a      *cistern.Allocator
	d      cistern.Device
	rng    *rand.Rand
	own    []*stream // its own; guarded by nothing, other workers do not look
	shared []*stream // lasting streams of all workers
	pool   cistern.Pool
	poolID *atomic.Uint64
	post   *post
	event  cuda.Event
	blocks []block
	held   uint64 // bytes of blocks
	budget uint64 // what it would like to hold
	small  uint64 // sizes of the present mode: 2^small to 2^large
	large  uint64
	cur    *stream
	limit  uint64
	ops    int
	ooms   int
}

// post is where workers leave blocks for each other.
type post struct {
	mu     sync.Mutex
	blocks []block // +checklocks:mu
}

// run has workers do ops operations together, then gives everything back. It returns how many were done and how many
// requests failed for want of memory.
func run(ctx context.Context, m gpu.Machine, a *cistern.Allocator, d cistern.Device, all []*stream, ops, workers int, seed uint64) (done, ooms int, err error) {
	var crew []*worker
	var lasting []*stream
	for _, s := range all {
		if s.lasts {
			lasting = append(lasting, s)
		}
	}
	var ids atomic.Uint64
	ids.Store(seed<<8 | uint64(workers)<<1 | 1)
	p := &post{}
	for i := range workers {
		w := &worker{m: m, a: a, d: d, rng: rand.New(rand.NewPCG(seed, uint64(i+workers*100))), poolID: &ids, post: p, limit: d.Limit() / uint64(workers)}
		w.own = all[i*streams/workers : (i+1)*streams/workers] // streams that it replaces are replaced in there
		if w.event, err = m.EventCreate(d.ID()); err != nil {
			return 0, 0, err
		}
		crew = append(crew, w)
	}
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for i, w := range crew {
		w.shared = lasting
		wg.Go(func() {
			runtime.LockOSThread() // as a thread that calls CUDA is
			defer runtime.UnlockOSThread()
			errs[i] = w.work(ctx, ops/workers)
		})
	}
	wg.Wait()
	err = errors.Join(errs...)
	for _, w := range crew {
		done += w.ops
		ooms += w.ooms
		if err == nil {
			err = w.finish()
		}
	}
	if err != nil {
		return done, ooms, err
	}
	for _, b := range p.blocks {
		if err := crew[0].release(b); err != nil {
			return done, ooms, err
		}
	}
	for _, w := range crew {
		if err := m.EventDestroy(d.ID(), w.event); err != nil {
			return done, ooms, err
		}
	}
	return done, ooms, nil
}

func newStream(m gpu.Machine, d cistern.Device, blocking, lasts bool) (*stream, error) {
	h, err := m.StreamCreate(d.ID(), blocking)
	if err != nil {
		return nil, err
	}
	var opts []cistern.StreamOption
	if lasts {
		opts = append(opts, cistern.StreamDurable)
	}
	st, err := d.Stream(h, opts...)
	return &stream{h, st, lasts}, err
}

func (w *worker) chance(n int) bool { return w.rng.IntN(n) == 0 }

func (w *worker) work(ctx context.Context, ops int) error {
	for w.ops < ops {
		if w.ops%4096 < 2 {
			if ctx.Err() != nil {
				return nil
			}
			w.mode()
		}
		if err := w.step(); err != nil {
			return fmt.Errorf("operation %d: %w", w.ops, err)
		}
	}
	return nil
}

// mode changes what the program wants: other sizes, another amount, another stream. What it held for the last mode is
// then in the way of the next, so that memory must move.
func (w *worker) mode() {
	w.cur = w.own[w.rng.IntN(len(w.own))]
	switch w.rng.IntN(4) {
	case 0:
		w.small, w.large = 9, 20
	case 1:
		w.small, w.large = 12, 24
	case 2:
		w.small, w.large = 20, 27
	default:
		w.small, w.large = 9, 25
	}
	w.budget = w.limit/2 + w.rng.Uint64N(w.limit/2)
}

func (w *worker) step() error {
	switch {
	case w.chance(4000):
		return w.d.Trim()
	case w.chance(1500):
		return w.changePool()
	case w.chance(1500):
		return w.changeStream()
	case w.chance(300):
		w.post.mu.Lock()
		defer w.post.mu.Unlock()
		if n := len(w.post.blocks); n > 20 || n > 0 && w.chance(2) {
			b := w.post.blocks[n-1]
			w.post.blocks = w.post.blocks[:n-1]
			w.ops++
			return w.release(b)
		} else if len(w.blocks) > 0 {
			if b := w.remove(w.rng.IntN(len(w.blocks))); b.owner.lasts && b.writer.lasts && !b.private {
				w.post.blocks = append(w.post.blocks, b)
			} else {
				w.add(b)
			}
		}
		return nil
	}
	if len(w.blocks) > 0 && (w.held > w.budget || len(w.blocks) > 20_000 || w.chance(3)) {
		i := w.rng.IntN(len(w.blocks))
		if w.chance(12) {
			if err := w.share(&w.blocks[i]); err != nil {
				return err
			}
		}
		w.ops++
		return w.release(w.remove(i))
	}
	w.ops++
	return w.alloc()
}

func (w *worker) add(b block) {
	w.blocks = append(w.blocks, b)
	w.held += b.size
}

func (w *worker) remove(i int) block {
	b := w.blocks[i]
	w.blocks[i] = w.blocks[len(w.blocks)-1]
	w.blocks = w.blocks[:len(w.blocks)-1]
	w.held -= b.size
	return b
}

func (w *worker) alloc() error {
	bits := w.small + w.rng.Uint64N(w.large-w.small)
	b := block{size: 1<<bits + w.rng.Uint64N(1<<bits), seed: w.rng.Uint64(), owner: w.cur}
	if w.chance(8) {
		b.owner = w.own[w.rng.IntN(len(w.own))]
	}
	b.writer = b.owner
	var err error
	if w.pool != (cistern.Pool{}) && w.chance(5) {
		b.private = true
		b.p, err = w.pool.Alloc(b.size, b.owner.st)
	} else {
		b.p, err = w.d.Alloc(b.size, b.owner.st)
	}
	var oom *cistern.OutOfMemoryError
	if errors.As(err, &oom) {
		w.ooms++
		for range len(w.blocks)/2 + 1 {
			if len(w.blocks) == 0 {
				break
			}
			if err := w.release(w.remove(w.rng.IntN(len(w.blocks)))); err != nil {
				return err
			}
		}
		return nil
	}
	if err != nil {
		return err
	}
	if err := w.m.Fill(w.d.ID(), b.owner.handle, b.p, b.size, b.seed); err != nil {
		return fmt.Errorf("filling %d bytes: %w", b.size, err)
	}
	w.add(b)
	return nil
}

// share has another stream read, or write, the block, after what its writer has queued.
func (w *worker) share(b *block) error {
	s := w.shared[w.rng.IntN(len(w.shared))]
	if s == b.owner || s == b.writer {
		return nil
	}
	dev := w.d.ID()
	if err := w.m.EventRecord(dev, w.event, b.writer.handle); err != nil {
		return err
	}
	if err := w.m.StreamWaitEvent(dev, s.handle, w.event); err != nil {
		return err
	}
	if err := w.a.RecordStream(b.p, s.st); err != nil {
		return err
	}
	if err := w.m.Check(w.d.ID(), s.handle, b.p, b.size, b.seed); err != nil {
		return err
	}
	if w.chance(2) {
		b.seed = w.rng.Uint64()
		b.writer = s
		return w.m.Fill(w.d.ID(), s.handle, b.p, b.size, b.seed)
	}
	return nil
}

// release compares the block's contents on the stream that wrote them, and gives it back.
func (w *worker) release(b block) error {
	if err := w.m.Check(w.d.ID(), b.writer.handle, b.p, b.size, b.seed); err != nil {
		return fmt.Errorf("checking %d bytes: %w", b.size, err)
	}
	return w.a.Free(b.p)
}

// changePool releases the private pool, sometimes with blocks still out, and makes another.
func (w *worker) changePool() error {
	if w.pool != (cistern.Pool{}) {
		if w.chance(2) {
			if err := w.releaseAll(func(b *block) bool { return b.private }); err != nil {
				return err
			}
		}
		if err := w.pool.Release(); err != nil {
			return err
		}
	}
	var err error
	w.pool, err = w.d.NewPool(cistern.PoolID{1, w.poolID.Add(1)})
	return err
}

// changeStream destroys a stream of its own once nothing it owns is out, and makes another.
func (w *worker) changeStream() error {
	i := w.rng.IntN(len(w.own))
	s := w.own[i]
	if s.lasts {
		return nil
	}
	if err := w.releaseAll(func(b *block) bool { return b.owner == s || b.writer == s }); err != nil {
		return err
	}
	if err := w.m.StreamDestroy(w.d.ID(), s.handle); err != nil {
		return err
	}
	n, err := newStream(w.m, w.d, w.chance(2), false)
	if err != nil {
		return err
	}
	w.own[i] = n
	if w.cur == s {
		w.cur = n
	}
	return nil
}

func (w *worker) releaseAll(which func(*block) bool) error {
	for i := 0; i < len(w.blocks); {
		if !which(&w.blocks[i]) {
			i++
			continue
		}
		w.ops++
		if err := w.release(w.remove(i)); err != nil {
			return err
		}
	}
	return nil
}

func (w *worker) finish() error {
	ops := w.ops
	if err := w.releaseAll(func(*block) bool { return true }); err != nil {
		return err
	}
	w.ops = ops // what is given back at the end is not counted
	if w.pool != (cistern.Pool{}) {
		return w.pool.Release()
	}
	return nil
}
