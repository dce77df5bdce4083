package engine_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// A unmapped range between blocks that is narrower than every chunk that is free is no reason to fail: there is room for those
// elsewhere.
func TestNarrowGap(t *testing.T) {
	e := newEngine(t, sim.Options{Capacity: 16 * gib}, config.Options{}, 3)
	coarse := e.alloc(t, 14*gib, e.streams[0])
	x := e.alloc(t, 2*mib, e.streams[1])
	gap := e.alloc(t, 2*mib, e.streams[1])
	y := e.alloc(t, 2*mib, e.streams[1])
	z := e.alloc(t, 2*gib-6*mib, e.streams[2])
	e.free(t, gap)
	w := e.alloc(t, 2*mib, e.streams[2]) // takes the chunk from between the blocks
	e.free(t, coarse)
	v := e.alloc(t, 2*mib, e.streams[1])
	for _, p := range []cuda.Ptr{x, y, z, w, v} {
		e.free(t, p)
	}
}

// A program that does little but allocate can use all but a few per cent of a small device: what lies in partly used
// chunks is kept small where little can be held.
func TestSmallDevice(t *testing.T) {
	for _, c := range []struct {
		device, limit uint64
		part          float64
	}{{4 * gib, 0, 0.97}, {8 * gib, 0, 0.97}, {80 * gib, 4 * gib, 0.97}, {2 * gib, 0, 0.95}} {
		for seed := range uint64(3) {
			e := newEngine(t, sim.Options{Capacity: c.device, Lag: 5 * time.Millisecond, Busy: true, CallsTakeTime: true},
				config.Options{Limit: c.limit}, 1)
			budget := c.device
			if c.limit != 0 {
				budget = c.limit
			}
			rng := rand.New(rand.NewPCG(seed, 1))
			type block struct {
				p    cuda.Ptr
				size uint64
			}
			var blocks []block
			live, most := uint64(0), uint64(c.part*float64(budget))
			for step := range 4000 {
				e.drv.Advance(20 * time.Microsecond)
				// From 1 KiB to a sixteenth of the device, each power of two as often as any other.
				size := uint64(math.Exp2(10+rng.Float64()*(math.Log2(float64(budget))-4-10)))&^511 + 512
				for live+size > most {
					i := rng.IntN(len(blocks))
					e.free(t, blocks[i].p)
					live -= blocks[i].size
					blocks[i] = blocks[len(blocks)-1]
					blocks = blocks[:len(blocks)-1]
				}
				p, err := e.dev.Alloc(size, e.streams[0])
				if err != nil {
					t.Fatalf("%d MiB, limit %d MiB, seed %d, request %d with %.4f live: %v", c.device/mib, c.limit/mib, seed, step,
						float64(live+size)/float64(budget), err)
				}
				blocks = append(blocks, block{p, size})
				live += size
			}
		}
	}
}

// Of free memory all can be had but the granules in which live blocks lie, also of what was paused and is back: it comes
// back in chunks that are as fine as what it went from where little can be held.
func TestRoomAfterPause(t *testing.T) {
	const granule = 2 * mib
	for _, c := range []struct {
		name          string
		device, limit uint64
		pause         bool
	}{{"never paused", 600 * mib, 0, false}, {"small device", 600 * mib, 0, true}, {"limit", 80 * gib, 600 * mib, true}} {
		for _, size := range []uint64{100 * kib, 300 * kib, 3 * mib} {
			t.Run(fmt.Sprintf("%s/%d", c.name, size), func(t *testing.T) {
				e := newEngine(t, sim.Options{Capacity: c.device}, config.Options{Limit: c.limit}, 2)
				var blocks []cuda.Ptr
				for range 590 * mib / size {
					p, err := e.dev.AllocWith(size, e.streams[0], engine.AllocOptions{Tag: 1})
					if err != nil {
						t.Fatal(err)
					}
					blocks = append(blocks, p)
				}
				if c.pause {
					if r, err := e.dev.Pause(engine.Selection{Tag: 1}, config.PauseOptions{Keep: config.KeepNone}); err != nil || r.Shared != 0 {
						t.Fatalf("%+v, %v", r, err)
					}
					if _, err := e.dev.Resume(engine.Selection{Tag: 1}); err != nil {
						t.Fatal(err)
					}
				}
				stays := map[uint64]bool{} // granules
				every := int(30 * mib / size)
				for i, p := range blocks {
					if i%every != 0 {
						e.free(t, p)
						continue
					}
					for a := uint64(p) / granule; a <= (uint64(p)+size-1)/granule; a++ {
						stays[a] = true
					}
				}
				rest := e.alloc(t, 600*mib-uint64(len(stays))*granule, e.streams[1])
				if _, err := e.dev.Alloc(granule, e.streams[1]); !errors.Is(err, cuda.ErrOutOfMemory) {
					t.Errorf("a request for more than there is: %v", err)
				}
				e.free(t, rest)
			})
		}
	}
}
