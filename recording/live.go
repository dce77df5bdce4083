package recording

import (
	"github.com/cistern-gpu/cistern/event"
)

// InitialLive is the requested bytes of the blocks that were live before the first event.
func (t *Trace) InitialLive() uint64 {
	var n uint64
	for i := range t.Initial {
		n += t.Initial[i].Requested
	}
	return n
}

// Live calls f after each event that changes the live bytes, with the event's index and the live bytes then: requested
// bytes from alloc to free_completed, blocks that were there before the first event included.
func (t *Trace) Live(f func(event int, bytes uint64)) {
	live := t.InitialLive()
	for i := range t.Events {
		switch e := &t.Events[i]; e.Kind {
		case event.Alloc:
			live += e.Size
		case event.FreeCompleted:
			live -= min(live, e.Size)
		default:
			continue
		}
		f(i, live)
	}
}

// PeakLive is the most bytes that were live at once, and the index of the event that reached it, -1 when that was
// before the first.
func (t *Trace) PeakLive() (bytes uint64, event int) {
	bytes, event = t.InitialLive(), -1
	t.Live(func(i int, n uint64) {
		if n > bytes {
			bytes, event = n, i
		}
	})
	return bytes, event
}

// LongestUS is the longest time between two events, in microseconds: 142 years, since events may lack a time or have one since
// 1970. A file may say anything, and sums of times have to be right, in nanoseconds too.
const LongestUS = 1 << 52

// SinceUS is the time from one time of a file to a later one, in microseconds: at least 0, at most LongestUS.
func SinceUS(from, to int64) int64 {
	if to <= from {
		return 0
	}
	return int64(min(uint64(to)-uint64(from), LongestUS))
}

// Duration is the time from the first event to the last, in microseconds.
func (t *Trace) Duration() int64 {
	var first, last int64
	seen := false
	for i := range t.Events {
		if us := t.Events[i].TimeUS; us != 0 {
			if !seen {
				first, seen = us, true
			}
			last = us
		}
	}
	return SinceUS(first, last)
}

// InitialReserved is the bytes of the segments that were held before the first event.
func (t *Trace) InitialReserved() uint64 {
	var n uint64
	for i := range t.InitialSegments {
		n += t.InitialSegments[i].Size
	}
	return n
}

// Reserved calls f after each event that changes the reserved bytes, with the event's index and the bytes of segments
// held then, those from before the first event included. A physical handle that is mapped more than once counts once,
// where the file tells handles.
func (t *Trace) Reserved(f func(event int, bytes uint64)) {
	n := t.InitialReserved()
	mapped := map[uint64]int{} // by handle
	for i := range t.Events {
		e := &t.Events[i]
		switch e.Kind {
		case event.SegmentAlloc, event.SegmentMap:
			if e.Handle != 0 {
				if mapped[e.Handle]++; mapped[e.Handle] > 1 {
					continue
				}
			}
			n += e.Size
		case event.SegmentFree, event.SegmentUnmap:
			if e.Handle != 0 {
				if mapped[e.Handle]--; mapped[e.Handle] > 0 {
					continue
				}
				delete(mapped, e.Handle)
			}
			n -= min(n, e.Size)
		default:
			continue
		}
		f(i, n)
	}
}

// RecordedPeakReserved is the most bytes of segments that the recorded run held at once.
func (t *Trace) RecordedPeakReserved() uint64 {
	peak := t.InitialReserved()
	t.Reserved(func(_ int, n uint64) { peak = max(peak, n) })
	return peak
}

// Counts is how many events of each kind the trace has.
func (t *Trace) Counts() (n [event.NumKinds]int) {
	for i := range t.Events {
		if k := t.Events[i].Kind; k < event.NumKinds {
			n[k]++
		}
	}
	return n
}

// RecordedSegmentEvents is how often the recorded run got memory from the driver and gave it back.
func (t *Trace) RecordedSegmentEvents() (got, gaveBack int) {
	n := t.Counts()
	return n[event.SegmentAlloc] + n[event.SegmentMap], n[event.SegmentFree] + n[event.SegmentUnmap]
}

// RecordedOOMs is how many requests the recorded run could not meet.
func (t *Trace) RecordedOOMs() int { return t.Counts()[event.OOM] }
