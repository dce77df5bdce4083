package fleet

import (
	"cmp"
	"slices"

	"github.com/cistern-gpu/cistern/recording"
)

// Job is the processes of one job.
type Job struct {
	Name      string
	processes []process
}

type process struct {
	id recording.Identity
	s  *Summary
}

// attempt orders the attempts of a job.
func (p process) attempt() [2]int { return [2]int{p.id.Requeue, p.id.Restart} }

func compareAttempts(a, b [2]int) int { return slices.Compare(a[:], b[:]) }

// Rank is the newest process of a rank, on the GPU where it has least headroom.
type Rank struct {
	ID      recording.Identity
	Summary *Summary
	Device  *Device

	Headroom int64 // bytes; what was missing where a request failed, negative
	Parts    Parts // of the GPU, at the last failure, else at the peak of what was reserved
	Growth   float64
	group    int // index
}

// Parts are what the memory of a GPU is used for.
type Parts struct {
	Used    uint64 `json:"used_bytes"`    // allocated by the program
	Split   uint64 `json:"split_bytes"`   // free within segments in use: fragmentation
	Cached  uint64 `json:"cached_bytes"`  // free otherwise
	Outside uint64 `json:"outside_bytes"` // outside the allocator
	Free    uint64 `json:"free_bytes"`
}

// Number is the number of a rank, or its place in the order of files where it has none.
func (r *Rank) Number() int { return r.ID.Rank }

// ranks are the newest processes of all ranks, by number; those without a rank come last. Earlier attempts and processes that
// have the same rank beside its largest are counted.
func (j *Job) ranks() (ranks []*Rank, restarted map[int]int, beside int) {
	restarted = map[int]int{}
	newest := [2]int{}
	for i := range j.processes {
		if a := j.processes[i].attempt(); compareAttempts(a, newest) > 0 {
			newest = a
		}
	}
	by := map[int][]process{}
	var alone []process
	for _, p := range j.processes {
		if p.id.Rank < 0 {
			alone = append(alone, p)
			continue
		}
		by[p.id.Rank] = append(by[p.id.Rank], p)
	}
	world := worldOf(by, newest)
	for number, list := range by {
		last := slices.MaxFunc(list, func(a, b process) int { return compareAttempts(a.attempt(), b.attempt()) }).attempt()
		if number >= world && world > 0 && compareAttempts(last, newest) < 0 {
			continue // of an attempt with more ranks
		}
		attempts := map[[2]int]bool{}
		var best *Rank
		for _, p := range list {
			attempts[p.attempt()] = true
			if p.attempt() != last {
				continue
			}
			r := newRank(p)
			if best == nil || r.s().Steps > best.s().Steps || r.s().Steps == best.s().Steps && r.Device.PeakReserved.Bytes > best.Device.PeakReserved.Bytes {
				best = r
			}
			beside++
		}
		beside--
		ranks = append(ranks, best)
		if len(attempts) > 1 {
			restarted[number] = len(attempts) - 1
		}
	}
	slices.SortFunc(ranks, func(a, b *Rank) int { return cmp.Compare(a.ID.Rank, b.ID.Rank) })
	for _, p := range alone {
		ranks = append(ranks, newRank(p))
	}
	return ranks, restarted, beside
}

// worldOf is the number of ranks of the newest attempt, where its files are all there; else 0.
func worldOf(by map[int][]process, newest [2]int) int {
	world, present := 0, map[int]bool{}
	for number, list := range by {
		for _, p := range list {
			if p.attempt() == newest {
				world = max(world, p.id.World)
				present[number] = true
			}
		}
	}
	if len(present) < world {
		return 0
	}
	return world
}

func (r *Rank) s() *Summary { return r.Summary }

func newRank(p process) *Rank {
	r := &Rank{ID: p.id, Summary: p.s, Device: &Device{}, group: -1}
	for i := range p.s.Devices {
		d := &p.s.Devices[i]
		if headroom, parts := measure(d); i == 0 || headroom < r.Headroom {
			r.Device, r.Headroom, r.Parts = d, headroom, parts
		}
	}
	if p.s.Allocator == AllocatorCistern { // which moves free memory to where it is needed
		r.Parts.Cached += r.Parts.Split
		r.Parts.Split = 0
	}
	r.Growth = growth(&r.Device.Series)
	return r
}

// measure is how much memory was left on a device, and what the rest was used for.
func measure(d *Device) (headroom int64, p Parts) {
	if n := len(d.Failures); n > 0 {
		f := &d.Failures[n-1]
		p = Parts{Used: f.Allocated, Split: min(f.Split, f.Reserved-min(f.Reserved, f.Allocated)), Free: f.Free}
		p.Cached = less(f.Reserved, p.Used+p.Split)
		p.Outside = less(d.Total, f.Reserved+f.Free)
		return -max(1, int64(f.Requested)-int64(d.left(f))), p
	}
	k := &d.PeakReserved
	p = Parts{Used: k.Allocated, Split: min(k.Split, less(k.Bytes, k.Allocated)), Outside: d.PeakOutside.Bytes}
	p.Cached = less(k.Bytes, p.Used+p.Split)
	p.Free = less(d.Total, k.Bytes+p.Outside)
	headroom = int64(d.Total) - int64(k.Bytes) - int64(p.Outside)
	if d.Limit > 0 {
		headroom = min(headroom, int64(d.Limit)-int64(k.Bytes))
	}
	return headroom, p
}

// left is what a request that failed could have had: of the GPU, or of the process's limit where that is less.
func (d *Device) left(f *Failure) uint64 {
	if d.Limit > 0 {
		return min(f.Free, less(d.Limit, f.Reserved))
	}
	return f.Free
}

// less is a - b, at least 0.
func less(a, b uint64) uint64 { return a - min(a, b) }

// parts with names, for comparisons.
func (p *Parts) list() [4]struct {
	name  string
	bytes uint64
} {
	return [4]struct {
		name  string
		bytes uint64
	}{{CauseUsed, p.Used}, {CauseFragmentation, p.Split}, {CauseCached, p.Cached}, {CauseOutside, p.Outside}}
}

// growth is by how many bytes a step what is allocated at the ends of steps grows; 0 where it does not grow steadily. The lowest
// values of the second, third and last quarter of the steps have to lie on a line that rises.
func growth(s *Series) float64 {
	n := s.Len()
	if n < minGrowth {
		return 0
	}
	lowest := func(from, to int) (at int64, low float64) {
		k := from
		for i := from; i < to; i++ {
			if s.Now[i] < s.Now[k] {
				k = i
			}
		}
		return s.Step[k], float64(s.Now[k])
	}
	s2, a := lowest(n/4, n/2)
	s3, b := lowest(n/2, 3*n/4)
	s4, c := lowest(3*n/4, n)
	rise := c - a
	if rise < growthLeast || rise < growthPart*a || s4 <= s2 {
		return 0
	}
	slope := rise / float64(s4-s2)
	middle := a + slope*float64(s3-s2)
	if b < middle-growthBend*rise || b > middle+growthBend*rise {
		return 0
	}
	return slope
}

const (
	minGrowth   = 12      // rows
	growthLeast = 8 << 20 // from the second quarter to the last
	growthPart  = 0.001
	growthBend  = 0.25 // how far the third quarter may be off the line, of the rise
)
