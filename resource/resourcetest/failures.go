package resourcetest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
)

// Failures makes each driver call of a scenario fail, one after the other, and then each and all that follow for a
// while, over a simulated machine that machine makes. A call that fails changes nothing: what is out stays usable, what
// was not given back is given back later, and in the end nothing is left. With -short, as under the race detector, every fifth.
func Failures(t *testing.T, machine func() *Sim, c Case) {
	step := uint64(1)
	if testing.Short() {
		step = 5
	}
	for _, lasting := range []int{1, 4} {
		for _, code := range []cuda.Code{cuda.ErrOutOfMemory, cuda.ErrNotPermitted} {
			t.Run(fmt.Sprintf("%d calls with %v", lasting, code), func(t *testing.T) {
				k := uint64(1)
				for ; ; k += step {
					if k > 5000 {
						t.Fatal("the scenario does not end")
					}
					m := machine()
					if err := m.RetainContext(dev); err != nil {
						t.Fatal(err)
					}
					failed, err := scenario(m, c, k, lasting, code)
					if err != nil {
						t.Fatalf("call %d (%s): %v", k, failed, err)
					}
					if failed == "" {
						break
					}
				}
				if k < 4 {
					t.Errorf("the scenario makes %d driver calls", k-1)
				}
			})
		}
	}
}

// scenario makes call k fail, and those after it, and returns its name, "" where there was none.
func scenario(m *Sim, c Case, k uint64, lasting int, code cuda.Code) (name string, err error) {
	// Streams of the test's own, from before.
	s, err := m.StreamCreate(dev, false)
	if err != nil {
		return "", err
	}
	before, base := held(m), m.CallNumber()
	working := true // the scenario's own calls are not to fail
	m.FailCall(func(call string, n uint64) cuda.Code {
		if !working && n >= base+k && n < base+k+uint64(lasting) {
			if name == "" {
				name = call
			}
			return code
		}
		return cuda.Success
	})
	// try makes a call that may fail: with one of the codes, or not for want of one.
	try := func(f func() error) (failed bool, err error) {
		working = false
		err = f()
		working = true
		switch {
		case err == nil:
			return false, nil
		case name == "":
			return true, fmt.Errorf("failed without a failing call: %w", err)
		case !errors.Is(err, code):
			return true, fmt.Errorf("%w; want %w in it", err, code)
		}
		return true, nil
	}

	var r resource.Resource
	var done func() error
	failed, err := try(func() (err error) { r, done, err = c.New(m); return err })
	if err != nil {
		return name, err
	}
	if failed {
		// Where undoing fails too nothing tries again.
		if after := held(m); lasting > 1 {
			before = after
		} else if after != before {
			return name, fmt.Errorf("what could not be made left %+v; before, there was %+v", after, before)
		}
		if r, done, err = c.New(m); err != nil {
			return name, err
		}
	}
	ordered := r.Traits().StreamOrdered
	var out []piece
	for i, size := range []uint64{8, 1000, 3 << 20, 20 << 20} {
		x := piece{size: size, seed: uint64(i)}
		if failed, err = try(func() (err error) { x.p, err = r.Alloc(size, 0, s); return err }); err != nil {
			return name, err
		}
		if failed {
			if x.p != 0 {
				return name, fmt.Errorf("a request that failed gave out %#x", uint64(x.p))
			}
			continue
		}
		if err := m.Fill(dev, s, x.p, size, x.seed); err != nil {
			return name, err
		}
		out = append(out, x)
	}
	if b, ok := resource.As[resource.Backing](r); ok {
		if err := m.StreamSynchronize(dev, s); err != nil {
			return name, err
		}
		for _, x := range out {
			failed, err := try(func() error { return b.Unback(x.p, x.size) })
			if err == nil && failed { // it is as it was
				err = m.Check(dev, s, x.p, x.size, x.seed)
			}
			if err == nil {
				err = m.StreamSynchronize(dev, s)
			}
			if err != nil {
				return name, err
			}
			for failed = true; failed; {
				if failed, err = try(func() error { return b.Back(x.p, x.size) }); err != nil {
					return name, err
				}
			}
			if err := m.Fill(dev, s, x.p, x.size, x.seed); err != nil {
				return name, err
			}
		}
	}
	for _, x := range out {
		for tries := 0; ; tries++ {
			if err := m.Check(dev, s, x.p, x.size, x.seed); err != nil { // the first time, and after each failure
				return name, err
			}
			if !ordered {
				if err := m.StreamSynchronize(dev, s); err != nil {
					return name, err
				}
			}
			failed, err := try(func() error { return r.Free(x.p, x.size, 0, s) })
			if err != nil {
				return name, err
			}
			if !failed {
				break
			}
			if tries > 10*lasting {
				return name, errors.New("memory cannot be given back")
			}
		}
	}
	for tries := 0; ; tries++ {
		failed, err := try(func() error { return end(m, r, done) })
		if err != nil {
			return name, err
		}
		if tries > 10*lasting {
			return name, errors.New("it cannot be closed")
		}
		if !failed {
			break
		}
	}
	if after := held(m); after != before {
		return name, fmt.Errorf("the resource left %+v; before, there was %+v", after, before)
	}
	return name, m.Wrong()
}
