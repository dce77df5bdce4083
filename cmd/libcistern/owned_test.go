//go:build linux && cgo

package main

import (
	"errors"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/resource"
)

// closing is a resource that counts what becomes of it.
type closing struct {
	mu      sync.Mutex
	next    cuda.Ptr
	out     int
	closed  int
	trimmed int
	fails   error
}

func (c *closing) Alloc(size, _ uint64, _ cuda.Stream) (cuda.Ptr, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fails != nil || size == 0 {
		return 0, c.fails
	}
	c.out++
	c.next += 1 << 20
	return c.next, nil
}

func (c *closing) Free(p cuda.Ptr, _, _ uint64, _ cuda.Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fails == nil && p != 0 {
		c.out--
	}
	return c.fails
}

func (c *closing) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out != 0 {
		panic("closed while memory is out")
	}
	c.closed++
	return nil
}

func (c *closing) Trim() error {
	c.trimmed++
	return nil
}

func (c *closing) MemInfo() (free, total uint64, err error) { return 1, 2, nil }
func (c *closing) Equal(o resource.Resource) bool           { return resource.Resource(c) == o }
func (c *closing) Traits() resource.Traits                  { return resource.Traits{Name: "closing"} }
func (c *closing) Unback(cuda.Ptr, uint64) error            { return nil }
func (c *closing) Back(cuda.Ptr, uint64) error              { return nil }

// TestOwned: what a pool's resource holds goes once, when the pool has ended and all memory is back.
func TestOwned(t *testing.T) {
	c := &closing{}
	r, o := own(c)
	if _, ok := resource.As[resource.Backing](r); !ok {
		t.Error("what the resource can do is hidden")
	}
	if !o.Equal(r) || !r.Equal(o) || r.Equal(c) {
		t.Error("it is not equal to itself, or to something else")
	}
	trimmer, ok := resource.As[resource.Trimmer](r)
	if !ok || trimmer.Trim() != nil || c.trimmed != 1 {
		t.Errorf("trimmed %d times", c.trimmed)
	}
	p, err := o.Alloc(1, 0, 0)
	if err != nil || p == 0 {
		t.Fatal(p, err)
	}
	if q, err := o.Alloc(0, 0, 0); q != 0 || err != nil {
		t.Errorf("0 bytes: %v, %v", q, err)
	}
	c.fails = errors.New("no")
	if _, err := o.Alloc(1, 0, 0); err != c.fails {
		t.Errorf("got %v", err)
	}
	o.end()
	if err := o.Free(p, 1, 0, 0); err != c.fails || c.closed != 0 {
		t.Errorf("a free that fails: %v, closed %d times", err, c.closed)
	}
	c.fails = nil
	if err := o.Free(0, 0, 0, 0); err != nil || c.closed != 0 {
		t.Errorf("null: %v, closed %d times with memory out", err, c.closed)
	}
	if err := o.Free(p, 1, 0, 0); err != nil || c.closed != 1 {
		t.Errorf("the last free: %v, closed %d times", err, c.closed)
	}
	o.end()
	if _, err := o.Alloc(1, 0, 0); err == nil || c.closed != 1 {
		t.Errorf("after the end: %v, closed %d times", err, c.closed)
	}
	if err := trimmer.Trim(); err != nil || c.trimmed != 1 {
		t.Errorf("after the end: %v, trimmed %d times", err, c.trimmed)
	}
}

// TestOwnedByMany: threads that allocate and free while the pool ends.
func TestOwnedByMany(t *testing.T) {
	for range 200 {
		c := &closing{}
		o := &owned{Resource: c}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 50 {
					p, err := o.Alloc(1, 0, 0)
					if err != nil {
						return
					}
					if err := o.Free(p, 1, 0, 0); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Go(o.end)
		wg.Wait()
		if c.closed != 1 || c.out != 0 {
			t.Fatalf("closed %d times, %d out", c.closed, c.out)
		}
	}
}
