//go:build linux && cgo

package gpu_test

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/nvidia/standin"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/gpu"
	"github.com/cistern-gpu/cistern/internal/testkit"
)

// each runs a test over the stand-in library, and over the real driver where there is one.
func each(t *testing.T, f func(t *testing.T, g *gpu.GPU)) {
	t.Run("stand-in", func(t *testing.T) {
		g, err := gpu.OpenLibrary(standin.Build(t))
		if err != nil {
			t.Fatal(err)
		}
		f(t, g)
	})
	t.Run("real", func(t *testing.T) {
		g, err := gpu.Open()
		if err != nil {
			t.Skip(err)
		}
		f(t, g)
	})
}

// What Fill writes is what Pattern says, what Check counts is what differs, at every odd size.
func TestFillAndCheck(t *testing.T) {
	each(t, func(t *testing.T, g *gpu.GPU) {
		counter, err := g.NewCounter(0)
		must(t, err)
		p, err := g.MemAlloc(0, 1<<20+16)
		must(t, err)
		s, err := g.StreamCreate(0, false)
		must(t, err)
		total := uint64(0)
		for _, size := range []uint64{0, 1, 7, 8, 9, 512, 4095, 1 << 16, 1<<20 - 1, 1 << 20} {
			must(t, g.Memset(0, p, 0xEE, size+16, s))
			must(t, g.Fill(0, s, p, size, size))
			must(t, g.Check(0, s, p, size, size, counter))
			must(t, g.StreamSynchronize(0, s))
			got, want := make([]byte, size+16), make([]byte, size)
			must(t, g.CopyFromDevice(0, got, p))
			gpu.Pattern(want, size)
			if !bytes.Equal(got[:size], want) {
				t.Errorf("%d bytes: not the pattern", size)
			}
			if !bytes.Equal(got[size:], bytes.Repeat([]byte{0xEE}, 16)) {
				t.Errorf("%d bytes: wrote behind them", size)
			}
			if n, err := g.Counter(0, counter); n != total || err != nil {
				t.Errorf("%d bytes: %d are wrong, %v", size, n-total, err)
			}
			if size > 0 {
				must(t, g.CopyToDevice(0, p+cuda.Ptr(size)-1, []byte{^want[size-1]}))
				must(t, g.Check(0, s, p, size, size, counter))
				if n, err := g.Counter(0, counter); n != total+1 || err != nil {
					t.Errorf("%d bytes: one wrong byte counts %d, %v", size, n-total, err)
				}
				total++
			}
		}
		must(t, g.StreamDestroy(0, s))
		must(t, g.MemFree(0, p))
		must(t, g.MemFree(0, counter))
	})
}

// On a real GPU the spin kernel takes the time it is asked for, and the host does not wait for it.
func TestSpin(t *testing.T) {
	g, err := gpu.Open()
	if err != nil {
		t.Skip(err)
	}
	must(t, g.Use(0))
	s, err := g.StreamCreate(0, false)
	must(t, err)
	from, err := g.EventCreateTiming(0)
	must(t, err)
	to, err := g.EventCreateTiming(0)
	must(t, err)
	must(t, g.Spin(0, s, time.Millisecond)) // the first launch loads code
	must(t, g.StreamSynchronize(0, s))
	start := time.Now()
	must(t, g.EventRecord(0, from, s))
	must(t, g.Spin(0, s, 50*time.Millisecond))
	must(t, g.EventRecord(0, to, s))
	if d := time.Since(start); d > 20*time.Millisecond {
		t.Errorf("queueing took %v", d)
	}
	must(t, g.EventSynchronize(0, to))
	if d, err := g.EventElapsed(0, from, to); err != nil || d < 49*time.Millisecond || d > 60*time.Millisecond {
		t.Errorf("a spin of 50ms took %v, %v", d, err)
	}
}

func TestUse(t *testing.T) {
	g, err := gpu.OpenLibrary(standin.Build(t))
	must(t, err)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := g.Use(0); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, dev := range []cuda.Device{-1, 1} {
		if err := g.Use(dev); !errors.Is(err, cuda.ErrInvalidDevice) {
			t.Errorf("device %d: %v", dev, err)
		}
	}
}

func TestOpenFails(t *testing.T) {
	if _, err := gpu.OpenLibrary("/nowhere/libcuda.so.1"); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Error(err)
	}
	if _, err := gpu.New(sim.New(sim.Options{})); err == nil || err.Error() != "driver sim runs no kernels" {
		t.Error(err)
	}
	t.Setenv("STANDIN_FAIL", "cuModuleLoadDataEx=218")
	g, err := gpu.OpenLibrary(standin.Build(t))
	must(t, err)
	if err := g.Spin(0, cuda.StreamLegacy, 1); err == nil || !strings.Contains(err.Error(), "loading the test kernels: cuModuleLoadDataEx") {
		t.Error(err)
	}
}

// must stops the test on an error.
var must = testkit.Must
