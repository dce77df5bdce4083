package analyze

import (
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
)

// Curve is a step function over events: from Event[i] on (after it), the value is Value[i], until Event[i+1].
// Event -1 is before the first event.
type Curve struct {
	Event []int32
	Value []uint64 // bytes
}

func (c *Curve) add(i int, v uint64) {
	if n := len(c.Value); n > 0 && c.Value[n-1] == v {
		return
	}
	c.Event = append(c.Event, int32(i))
	c.Value = append(c.Value, v)
}

// Peak is the largest value and the event where it is first reached; event -1 and 0 bytes for an empty curve.
func (c *Curve) Peak() (value uint64, event int) {
	event = -1
	for i, v := range c.Value {
		if v > value || i == 0 {
			value, event = v, int(c.Event[i])
		}
	}
	return value, event
}

// Downsample keeps at most about limit points, the smallest and the largest of every stretch of events among them, each at
// its own event: peaks and valleys stay exact, in height and in place. The first and last points stay.
func (c Curve) Downsample(limit int) Curve {
	n := len(c.Value)
	if n <= limit || limit < 4 {
		return c
	}
	buckets := (limit - 2) / 2
	out := Curve{Event: make([]int32, 0, limit), Value: make([]uint64, 0, limit)}
	out.add(int(c.Event[0]), c.Value[0])
	for b := range buckets {
		from, to := 1+b*(n-2)/buckets, 1+(b+1)*(n-2)/buckets
		if from == to {
			continue
		}
		low, high := from, from
		for i := from; i < to; i++ {
			if c.Value[i] < c.Value[low] {
				low = i
			}
			if c.Value[i] > c.Value[high] {
				high = i
			}
		}
		out.add(int(c.Event[min(low, high)]), c.Value[min(low, high)])
		out.add(int(c.Event[max(low, high)]), c.Value[max(low, high)])
	}
	out.add(int(c.Event[n-1]), c.Value[n-1])
	return out
}

// Curves are what a trace says of memory over time.
type Curves struct {
	Live      Curve // requested bytes, from alloc to free_completed
	Allocated Curve // the same, rounded to 512
	Reserved  Curve // held from the driver; empty when the file does not say
}

// RecordedCurves walks a trace once.
func RecordedCurves(t *recording.Trace) Curves {
	var c Curves
	s := startState(t)
	put := func(i int) {
		c.Live.add(i, s.liveBytes)
		c.Allocated.add(i, s.allocated)
		c.Reserved.add(i, s.reserved)
	}
	put(-1)
	for i := range t.Events {
		s.apply(i, &t.Events[i])
		if k := t.Events[i].Kind; k != event.FreeRequested && k <= event.SegmentUnmap {
			put(i)
		}
	}
	if !s.hasSegs {
		c.Reserved = Curve{}
	}
	return c
}
