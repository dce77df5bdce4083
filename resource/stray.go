package resource

import (
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
)

// strays are what an adaptor got and could neither hand out nor give back: it is given back at the next occasion.
type strays struct {
	up   Resource
	mu   sync.Mutex
	list []stray // +checklocks:mu
}

type stray struct {
	p           cuda.Ptr
	size, align uint64
	stream      cuda.Stream
}

// drop gives memory back, now or later.
func (s *strays) drop(p cuda.Ptr, size, align uint64, st cuda.Stream) {
	s.mu.Lock()
	s.list = append(s.list, stray{p, size, align, st})
	s.mu.Unlock()
	_ = s.drain()
}

// drain gives back what it can, and returns what failed first.
func (s *strays) drain() (first error) {
	s.mu.Lock()
	list := s.list
	s.list = nil
	s.mu.Unlock()
	for _, x := range list {
		if err := s.up.Free(x.p, x.size, x.align, x.stream); err != nil {
			s.mu.Lock()
			s.list = append(s.list, x)
			s.mu.Unlock()
			if first == nil {
				first = err
			}
		}
	}
	return first
}
