package replay

import (
	"math"
	"math/bits"
	"slices"
	"time"
)

// Latency is how long requests took, in microseconds of the host's time: the driver calls that a request made, by the cost model,
// and the waits in them. A request that was met from cache took 0. The allocator's own code is not in it: that of a model is not
// what it models. Result.NSPerEvent has the code's mean.
type Latency struct {
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
}

// requestTimes are the times of requests. Most are 0, which are counted only.
type requestTimes struct {
	zero int
	more []time.Duration
}

func (r *requestTimes) add(d time.Duration) {
	if d <= 0 {
		r.zero++
		return
	}
	r.more = append(r.more, d)
}

// latency sorts the times.
func (r *requestTimes) latency() Latency {
	slices.Sort(r.more)
	n := r.zero + len(r.more)
	at := func(q float64) float64 {
		i := int(math.Ceil(q*float64(n))) - 1 - r.zero // of the least time that a part of q of the requests do not exceed
		if i < 0 {
			return 0
		}
		return float64(r.more[i].Nanoseconds()) / 1e3
	}
	if n == 0 {
		return Latency{}
	}
	return Latency{P50: at(0.5), P99: at(0.99), P999: at(0.999), Max: at(1)}
}

// meanReserved is the mean of what is held from the driver, over time.
type meanReserved struct {
	us      int64  // up to which it is known
	hi, low uint64 // bytes times microseconds
}

// until notes what is held up to a time. A policy calls it where memory goes as time passes; nil: there is no need to.
func (m *meanReserved) until(us int64, reserved uint64) {
	if m == nil || us <= m.us {
		return
	}
	hi, low := bits.Mul64(reserved, uint64(us-m.us))
	var carry uint64
	m.low, carry = bits.Add64(m.low, low, 0)
	m.hi, _ = bits.Add64(m.hi, hi, carry)
	m.us = us
}

// value is the mean; 0 where no time passed.
func (m *meanReserved) value() uint64 {
	if m.us == 0 {
		return 0
	}
	mean, _ := bits.Div64(m.hi, m.low, uint64(m.us))
	return mean
}
