package soak

import (
	"math/rand/v2"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// hostTimes measures what the engine takes of the host's time when every request is met from its cache, over so many turns.
func hostTimes(r *report, m gpu.Machine, dev cuda.Device, opts cistern.Options, turns int) error {
	h, err := m.StreamCreate(dev, false)
	if err != nil {
		return err
	}
	a, err := cistern.New(m, opts)
	if err != nil {
		return err
	}
	d, err := a.Device(dev)
	if err != nil {
		return err
	}
	st, err := d.Stream(h, cistern.StreamDurable)
	if err != nil {
		return err
	}
	pairs := func(n int) error {
		for range n {
			p, err := d.Alloc(1<<20, st)
			if err != nil {
				return err
			}
			if err := a.Free(p); err != nil {
				return err
			}
		}
		return nil
	}
	if err := pairs(1000); err != nil {
		return err
	}
	began := time.Now()
	if err := pairs(turns); err != nil {
		return err
	}
	r.PairNS = float64(time.Since(began).Nanoseconds()) / float64(turns)
	if r.Churn2000NS, err = churn(a, d, st, 2000, turns*3/10); err != nil {
		return err
	}
	if r.Churn20000NS, err = churn(a, d, st, 20_000, turns*3/10); err != nil {
		return err
	}
	if err := a.Close(); err != nil {
		return err
	}
	return m.StreamDestroy(dev, h)
}

// churn is the time of one free and one allocation of another size, with so many blocks out, in nanoseconds.
func churn(a *cistern.Allocator, d cistern.Device, st cistern.Stream, live, n int) (float64, error) {
	rng := rand.New(rand.NewPCG(1, 2))
	sizes := make([]uint64, 1<<16)
	for i := range sizes {
		n := uint64(512) << rng.Uint64N(13) // up to 4 MiB, and the same again
		sizes[i] = n + rng.Uint64N(n)
	}
	blocks := make([]cuda.Ptr, live)
	var err error
	for i := range blocks {
		if blocks[i], err = d.Alloc(sizes[i%len(sizes)], st); err != nil {
			return 0, err
		}
	}
	next := 0
	turn := func(n int) error {
		for range n {
			i := next * 7919 % live
			if err := a.Free(blocks[i]); err != nil {
				return err
			}
			if blocks[i], err = d.Alloc(sizes[(next*31+live)%len(sizes)], st); err != nil {
				return err
			}
			next++
		}
		return nil
	}
	if err := turn(10 * live); err != nil { // until the heap has its shape
		return 0, err
	}
	began := time.Now()
	if err := turn(n); err != nil {
		return 0, err
	}
	took := time.Since(began)
	for _, p := range blocks {
		if err := a.Free(p); err != nil {
			return 0, err
		}
	}
	return float64(took.Nanoseconds()) / float64(n), nil
}
