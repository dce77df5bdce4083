package resource

import (
	"errors"
	"sync"

	"github.com/cistern-gpu/cistern/cuda"
)

// Counter counts bytes or allocations.
type Counter struct {
	Current int64 // out now; below zero where what was freed had been got before counting began
	Peak    int64 // the highest Current
	Total   int64 // of all allocations
}

func (c *Counter) add(n int64) {
	c.Current += n
	c.Peak = max(c.Peak, c.Current)
	if n > 0 {
		c.Total += n
	}
}

// Counters are those of a StatisticsAdaptor. Bytes are as they were asked for.
type Counters struct {
	Bytes, Allocations Counter
}

// StatisticsAdaptor counts what passes through it, as RMM's statistics_resource_adaptor: what is out, its peak and its
// total, in bytes and in allocations, and again within nested sections, which Push begins and Pop ends.
type StatisticsAdaptor struct {
	adaptor
	mu sync.Mutex
	// +checklocks:mu
	stack []Counters // the innermost section last
}

// Statistics makes that adaptor.
func Statistics(up Resource) *StatisticsAdaptor {
	return &StatisticsAdaptor{adaptor: adaptor{up}, stack: make([]Counters, 1)}
}

// Alloc counts memory once it is there.
func (s *StatisticsAdaptor) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	p, err := s.up.Alloc(size, align, st)
	if err == nil && p != 0 {
		s.count(int64(size), 1)
	}
	return p, err
}

// Free counts memory once it is gone.
func (s *StatisticsAdaptor) Free(p cuda.Ptr, size, align uint64, st cuda.Stream) error {
	err := s.up.Free(p, size, align, st)
	if err == nil && p != 0 {
		s.count(-int64(size), -1)
	}
	return err
}

func (s *StatisticsAdaptor) count(bytes, allocations int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	top := &s.stack[len(s.stack)-1]
	top.Bytes.add(bytes)
	top.Allocations.add(allocations)
}

// Counters are those of the innermost section: of everything, outside of any.
func (s *StatisticsAdaptor) Counters() Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stack[len(s.stack)-1]
}

// Push begins a section, whose counters start at zero, and returns those of the one around it. What a section counts is
// added to the one around it when Pop ends it.
func (s *StatisticsAdaptor) Push() Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	outer := s.stack[len(s.stack)-1]
	s.stack = append(s.stack, Counters{})
	return outer
}

// Pop ends the innermost section and returns its counters. Outside of any section it fails.
func (s *StatisticsAdaptor) Pop() (Counters, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.stack) - 1
	if n == 0 {
		return Counters{}, errors.New("statistics: Pop without Push")
	}
	inner := s.stack[n]
	s.stack = s.stack[:n]
	s.stack[n-1].Bytes.join(inner.Bytes)
	s.stack[n-1].Allocations.join(inner.Allocations)
	return inner, nil
}

// join adds what was counted in a section within.
func (c *Counter) join(inner Counter) {
	c.Peak = max(c.Peak, c.Current+inner.Peak)
	c.Current += inner.Current
	c.Total += inner.Total
}

func (s *StatisticsAdaptor) Equal(other Resource) bool { return sameResource(s, other) }
