package main

import (
	"bytes"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/open"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
)

// contents writes and compares the pattern of a seed, on the legacy default stream. Sizes are multiples of 8.
type contents interface {
	fill(p cuda.Ptr, size, seed uint64) error
	check(p cuda.Ptr, size, seed uint64) error
	// wrong waits for everything and is the number of differences so far.
	wrong() (uint64, error)
}

// openDevice opens the driver. promises is whether its figures are those of a GPU.
func openDevice(spec string, dev cuda.Device) (drv cuda.Driver, c contents, promises bool, err error) {
	if drv, err = open.Open(spec); err != nil {
		return nil, nil, false, err
	}
	if s, ok := drv.(*sim.Driver); ok {
		return s, &byHost{drv: s, dev: dev}, false, nil
	}
	g, err := gpu.New(drv)
	if err != nil {
		return nil, nil, false, err
	}
	k := &byKernel{g: g, dev: dev}
	k.counter, err = g.NewCounter(dev)
	return drv, k, true, err
}

type byKernel struct {
	g       *gpu.GPU
	dev     cuda.Device
	counter cuda.Ptr
}

func (k *byKernel) fill(p cuda.Ptr, size, seed uint64) error {
	return k.g.Fill(k.dev, cuda.StreamNull, p, size, seed)
}

func (k *byKernel) check(p cuda.Ptr, size, seed uint64) error {
	return k.g.Check(k.dev, cuda.StreamNull, p, size, seed, k.counter)
}

func (k *byKernel) wrong() (uint64, error) { return k.g.Counter(k.dev, k.counter) }

type byHost struct {
	drv   *sim.Driver
	dev   cuda.Device
	found uint64
}

func (h *byHost) fill(p cuda.Ptr, size, seed uint64) error {
	b := make([]byte, size)
	gpu.Pattern(b, seed)
	return h.drv.Write(h.dev, cuda.StreamNull, p, b)
}

func (h *byHost) check(p cuda.Ptr, size, seed uint64) error {
	b, want := make([]byte, size), make([]byte, size)
	if err := h.drv.ReadBack(h.dev, cuda.StreamNull, p, b); err != nil {
		return err
	}
	if gpu.Pattern(want, seed); !bytes.Equal(b, want) {
		h.found++
	}
	return nil
}

func (h *byHost) wrong() (uint64, error) { return h.found, h.drv.Fault() }
