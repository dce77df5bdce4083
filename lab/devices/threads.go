package devices

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/cuda"
)

// held is a block that some thread allocated, with the device it lies on and the stream that wrote it.
type held struct {
	block
	dev cuda.Device
	st  cistern.Stream
}

// threads allocates on both devices from eight threads, each with a stream on each device, and passes every block on to
// whichever thread comes next, which compares and frees it.
func threads(m *machine, _ io.Writer) error {
	const workers, rounds = 8, 400
	a, err := cistern.New(m.driver, cistern.Options{})
	if err != nil {
		return err
	}
	passed := make(chan held, 64)
	failures := make(chan error, workers)
	var all [workers][2]cistern.Stream
	for w := range all {
		for dev := range cuda.Device(2) {
			d, err := a.Device(dev)
			if err != nil {
				return err
			}
			handle, err := m.StreamCreate(dev, w%2 == 0)
			if err != nil {
				return err
			}
			if all[w][dev], err = d.Stream(handle); err != nil {
				return err
			}
		}
	}
	end := func(h held) error {
		if err := m.Check(h.dev, h.st.Handle(), h.p, h.size, h.seed); err != nil {
			return err
		}
		return a.Free(h.p)
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			runtime.LockOSThread() // a thread of its own, without a current CUDA context
			defer runtime.UnlockOSThread()
			random := rand.New(rand.NewPCG(1, uint64(w)))
			for i := range rounds {
				dev := cuda.Device(random.IntN(2))
				h := held{block: block{size: 1 + random.Uint64N(m.large/32), seed: uint64(w*rounds + i)}, dev: dev, st: all[w][dev]}
				d, err := a.Device(dev)
				if err == nil {
					h.p, err = d.Alloc(h.size, h.st)
				}
				if err == nil {
					err = m.Fill(dev, h.st.Handle(), h.p, h.size, h.seed)
				}
				for err == nil {
					select {
					case passed <- h:
					case old := <-passed:
						err = end(old)
						continue
					}
					break
				}
				if err != nil {
					failures <- fmt.Errorf("thread %d, device %d: %w", w, dev, err)
					return
				}
			}
		})
	}
	wg.Wait()
	close(passed)
	close(failures)
	for err := range failures {
		return err
	}
	for h := range passed {
		if err := end(h); err != nil {
			return err
		}
	}
	if err := m.Wrong(); err != nil {
		return err
	}
	for dev := range cuda.Device(2) {
		d, err := a.Device(dev)
		if err == nil {
			err = balanced(d)
		}
		if err == nil {
			err = d.Trim()
		}
		if err != nil {
			return err
		}
		if s := d.Stats(); s.Reserved.All.Current != 0 {
			return fmt.Errorf("device %d: %d bytes are left", dev, s.Reserved.All.Current)
		}
	}
	err = a.Close()
	for _, w := range all {
		for dev, st := range w {
			err = errors.Join(err, m.StreamDestroy(cuda.Device(dev), st.Handle()))
		}
	}
	return err
}
