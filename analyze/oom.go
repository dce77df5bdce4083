package analyze

import (
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// OOM explains one request that could not be met.
type OOM struct {
	Source    string `json:"source"` // "recorded", or the policy that was replayed
	Event     int    `json:"event"`
	TimeUS    int64  `json:"time_us"` // since the first event
	Requested uint64 `json:"requested_bytes"`
	Live      uint64 `json:"live_bytes"`
	Reserved  uint64 `json:"reserved_bytes"`
	// DeviceFree is what the device had left (recorded), or Capacity less Reserved (replayed).
	DeviceFree uint64 `json:"device_free_bytes"`
	Capacity   uint64 `json:"capacity_bytes"` // 0: none known
	// FreeInside are the reserved bytes that no live block covers, in Pieces ranges, the largest LargestFree bytes.
	// Known only for recorded failures of files that tell segments.
	FreeInside  uint64 `json:"free_inside_bytes"`
	Pieces      int    `json:"free_pieces"`
	LargestFree uint64 `json:"largest_free_bytes"`
	// Fragmentation is the part of the free bytes that lies outside the largest piece: 0 is one piece.
	Fragmentation float64  `json:"fragmentation"`
	ShortBy       *ShortBy `json:"short_by,omitempty"` // nil where that is not known
	Cause         string   `json:"cause"`              // one of the Cause words
	Why           []string `json:"why"`                // sentences
}

// Causes of a failed request.
const (
	// CauseCapacity: what was live and the request together are more than there is. No allocator could have met it.
	CauseCapacity = "capacity"
	// CauseFragmentation: enough was free, but in pieces each too small.
	CauseFragmentation = "fragmentation"
	// CauseCached: enough was free in one piece, but cached for other streams, pools or sizes.
	CauseCached = "cached"
	// The rest is known only where the process wrote down what it saw (recording.Failure).
	//
	// CauseLimit: a limit was in the way, of the process or of a pool; the device had enough.
	CauseLimit = "limit"
	// CauseProcesses: without what other processes held, the request would have fitted.
	CauseProcesses = "processes"
	// CausePinned: enough was free, but pinned by captured graphs.
	CausePinned = "pinned"
	// CausePending: enough was given back, but other streams still used it.
	CausePending = "pending"
	// CauseUpstream: what ran out is no memory of the device's.
	CauseUpstream = "upstream"
)

// maxOOMs bounds how many failures of one trace are explained: a loop that catches the error may fail without end.
const maxOOMs = 20

// ExplainRecorded explains the failures in a trace, the first maxOOMs of them, from what the file says of that moment.
func ExplainRecorded(t *recording.Trace) []OOM {
	var events []int
	for i := range t.Events {
		if t.Events[i].Kind == event.OOM && len(events) < maxOOMs {
			events = append(events, i)
		}
	}
	ooms := []OOM{}
	if len(events) == 0 {
		return ooms
	}
	capacity, _ := replay.CapacityFromTrace(t)
	walk(t, events, func(i int, s *state) { ooms = append(ooms, recordedOOM(t, i, s, capacity, 0)) })
	return ooms
}

// recordedOOM explains the failure at event i from the state then and, where there is one, the process's own words. given is
// the capacity where the user says what it was, else 0.
func recordedOOM(t *recording.Trace, i int, s *state, capacity, given uint64) OOM {
	m := s.addressMap(i)
	o := OOM{Source: "recorded", Event: i, TimeUS: timeOf(t, i), Requested: t.Events[i].Size, Live: s.liveBytes,
		Reserved: s.reserved, DeviceFree: t.Events[i].Addr, Capacity: capacity, FreeInside: m.FreeBytes,
		Pieces: m.FreePieces, LargestFree: m.LargestFree}
	if k := slices.IndexFunc(t.Failures, func(f *recording.Failure) bool { return f.Event == i }); k >= 0 {
		o.fromProcess(t.Failures[k])
		return o
	}
	if !s.hasSegs {
		o.explainBare()
		return o
	}
	o.explain(true)
	if kindOf(t) == runTorch {
		o.ShortBy = torchShortBy(t, i, s, given)
	}
	if x := o.ShortBy; x != nil && x.More > 0 {
		o.Why = append(o.Why, units.Sprintf("The most that it could have got was %s. With %s more memory a new segment would have met it.",
			sized(x.Available), sized(x.More)))
	}
	return o
}

// Failure is a request that a replayed policy could not meet.
type Failure struct {
	Policy    string
	Event     int
	Requested uint64
	Reserved  uint64 // of the policy then, after it had given back what it could
	Capacity  uint64
}

// ExplainReplayed explains the failure of a policy. What was live is the trace's; where the policy's free pieces lay is
// not known here, but that it failed says that none was large enough.
func ExplainReplayed(t *recording.Trace, f Failure) OOM {
	o := OOM{Source: f.Policy, Event: f.Event, TimeUS: timeOf(t, f.Event), Requested: f.Requested, Reserved: f.Reserved,
		Capacity: f.Capacity}
	walk(t, []int{f.Event - 1}, func(_ int, s *state) { o.Live = s.liveBytes })
	o.DeviceFree = o.available()
	if o.Reserved > o.Live {
		o.FreeInside = o.Reserved - o.Live
	}
	o.explain(false)
	return o
}

// explain fills Cause, Fragmentation and Why. pieces says whether the free pieces are known.
func (o *OOM) explain(pieces bool) {
	size := sized
	if o.FreeInside > 0 && pieces {
		o.Fragmentation = 1 - float64(o.LargestFree)/float64(o.FreeInside)
	}
	say := func(format string, args ...any) { o.Why = append(o.Why, units.Sprintf(format, args...)) }
	need := o.Live + o.Requested
	if o.Capacity > 0 && need > o.Capacity {
		o.Cause = CauseCapacity
		say("%s were live and %s more were asked for: %s, %s over the limit of %s. No allocator could have met it.",
			size(o.Live), size(o.Requested), size(need), size(need-o.Capacity), size(o.Capacity))
		if missing := need - o.Capacity; missing > o.Live {
			say("It takes a limit of %s at least: with nothing else live it would have failed too.", size(need))
		} else {
			say("It takes a limit of %s at least, or %s less live at this moment.", size(need), size(missing))
		}
		return
	}
	o.Cause = CauseCached
	if o.Capacity > 0 {
		say("%s were live; with the %s asked for that is %s, within the limit of %s.",
			size(o.Live), size(o.Requested), size(need), size(o.Capacity))
	} else {
		say("%s were live and %s were asked for.", size(o.Live), size(o.Requested))
	}
	if !pieces {
		if o.Source != "recorded" {
			o.Cause = CauseFragmentation
			say("After it freed all that it could, %s were still reserved: %s of that was not in use, in pieces between blocks "+
				"or rounded away, none large enough.", size(o.Reserved), size(o.FreeInside))
			if o.DeviceFree < o.Requested {
				say("Beside it the limit left %s, less than the %s asked for.", size(o.DeviceFree), size(o.Requested))
			} else {
				say("Beside it the limit left %s: enough for the %s asked for, but not for the segment that this policy takes "+
					"from the driver for it.", size(o.DeviceFree), size(o.Requested))
			}
			return
		}
		say("%s of the %s reserved were not in use.", size(o.FreeInside), size(o.Reserved))
		return
	}
	if o.LargestFree < o.Requested {
		o.Cause = CauseFragmentation
		say("%s of the %s reserved were free, in %d pieces, the largest of %s: %.0f %% of the free memory lay outside it.",
			size(o.FreeInside), size(o.Reserved), o.Pieces, size(o.LargestFree), 100*o.Fragmentation)
		return
	}
	say("%s were free in one piece, in %d pieces %s: they belonged to another stream or pool, or to another class of "+
		"sizes.", size(o.LargestFree), o.Pieces, size(o.FreeInside))
}

// sized is a size for a sentence of units.Sprintf's.
func sized(n uint64) units.Size { return units.Size(n) }

// available is what could still be reserved.
func (o *OOM) available() uint64 {
	if o.Capacity > o.Reserved {
		return o.Capacity - o.Reserved
	}
	return 0
}
