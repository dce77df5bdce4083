package engine_test

import (
	"errors"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/memory"
)

// A request for which what is free elsewhere is too large for the place that needs the least looks for a roomier one. By
// then nothing may be locked that is locked again on the way: these requests deadlocked.

// narrowPlace has stream 0 allocate from a pool whose memory there is, at the end: 16 MiB free, 2 MiB unmapped, 2 MiB in
// use; before lies what filler asks for. Stream 1 has a chunk of 16 MiB free, and the device is at its limit.
func narrowPlace(t *testing.T, e *fixture, p *engine.Pool, filler uint64) {
	t.Helper()
	alloc := func(st *engine.Stream, size uint64) cuda.Ptr {
		t.Helper()
		ptr, err := p.Alloc(size, st)
		must(t, err)
		return ptr
	}
	a, b := e.streams[0], e.streams[1]
	if filler > 0 {
		alloc(a, filler)
	}
	tail, between := alloc(a, 16*mib), alloc(a, 2*mib)
	if after := alloc(a, 2*mib); between != tail+16*mib || after != between+2*mib {
		t.Fatalf("blocks at %#x, %#x and %#x", tail, between, after)
	}
	e.free(t, between)
	must(t, p.Trim())
	e.free(t, tail)
	chunk := alloc(b, 16*mib)
	e.free(t, chunk)
	segments := 0
	for _, s := range e.dev.Views.SnapshotPool(p.ID()) {
		for _, c := range s.Chunks {
			if s.Addr == uint64(chunk) && c.Size == 16*mib {
				segments++
			}
		}
	}
	if segments != 1 {
		t.Fatalf("the free memory of the other stream is not one chunk of 16 MiB: %+v", e.dev.Views.SnapshotPool(p.ID()))
	}
	e.dev.SetLimit(uint64(e.dev.Views.Stats().Reserved.All.Current))
}

// The roomier place needs more, which exceeds the pool's limit, so that free chunks of the pool's other streams go.
func TestRoomierPlaceExceedsPoolLimit(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 80 * gib}, config.Options{}, 2)
	e.alloc(t, 4*gib, e.streams[0]) // so that chunks are as large as what they are for
	p, err := e.dev.NewPool(memory.PoolID{1, 1}, config.PoolOptions{Limit: 50 * mib})
	must(t, err)
	narrowPlace(t, e, p, 0)
	_, err = p.Alloc(18*mib, e.streams[0])
	must(t, err)
	if s := p.Stats(); s.Reserved > 50*mib || s.Allocated != 20*mib {
		t.Errorf("%+v", s)
	}
}

// fewAddresses is a driver whose address space has room for so many reservations of 4 GiB.
type fewAddresses struct {
	cuda.Driver
	left int
}

func (f *fewAddresses) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	if size > 4*gib || f.left == 0 {
		return 0, &cuda.Error{Op: "cuMemAddressReserve", Code: cuda.ErrOutOfMemory}
	}
	f.left--
	return f.Driver.AddressReserve(size, align, hint)
}

func (f *fewAddresses) AddressFree(p cuda.Ptr, size uint64) error {
	f.left++
	return f.Driver.AddressFree(p, size)
}

// There is no roomier place and there are no more addresses, so that those of streams that have no block out go.
func TestRoomierPlaceNeedsAddresses(t *testing.T) {
	s := sim.New(sim.Options{Capacity: 80 * gib})
	drv := &fewAddresses{Driver: s, left: 2}
	e := newEngineOver(t, s, drv, config.Options{}, 2)
	narrowPlace(t, e, e.dev.DefaultPool(), 4*gib-36*mib)
	_, err := e.dev.Alloc(18*mib, e.streams[0])
	must(t, err)
	if drv.left != 0 {
		t.Errorf("%d reservations are left", drv.left)
	}
	if _, err := e.dev.Alloc(18*mib, e.streams[1]); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("a request without addresses: %v", err)
	}
}
