package analyze

import (
	"fmt"
	"strings"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
)

// Limit is the bytes that the device's memory of a process could come to when a request failed, and in words what set
// that bound; 0 where nothing says.
func limitInForce(f *recording.Failure) (bytes uint64, from string) {
	if f.DeviceTotal > 0 {
		bytes, from = f.Reserved-min(f.Reserved, f.Elsewhere)+f.DeviceFree, "reserved then and free on the device"
	}
	if f.Limit > 0 && (bytes == 0 || f.Limit < bytes) {
		bytes, from = f.Limit, "the limit that Cistern was given"
		for _, l := range f.Limits {
			if l.Kind == "cistern" && l.From != "" {
				from = "the limit set by " + settingOf(l.From)
			}
		}
	}
	return bytes, from
}

// limitOfSettings is the limit that the process was started with, by what it wrote of a failure, so that it was in force at
// those before as well; 0 where there was none, or the program had another one by then.
func limitOfSettings(t *recording.Trace) (bytes uint64, from string) {
	for _, f := range t.Failures {
		if n, set := limitInForce(f); n == f.Limit && strings.HasPrefix(set, "the limit set by the setting ") {
			bytes, from = n, set
		}
	}
	return bytes, from
}

// settingOf is where a limit is set, in a sentence.
func settingOf(from string) string {
	from = strings.TrimPrefix(from, "set by ") // as earlier versions wrote it
	if strings.HasPrefix(from, "setting ") {
		return "the " + from
	}
	return from
}

// away is what blocks hold that is not the device's memory: what is paused, and what lies in pools of other memory.
func away(f *recording.Failure) uint64 { return f.Paused + f.UsedElsewhere }

// elsewhere is what the other processes on the device used, as far as the driver told.
func elsewhere(f *recording.Failure) (bytes uint64, processes int) {
	for _, n := range f.Others {
		if !n.Self {
			bytes += n.Bytes
			processes++
		}
	}
	return bytes, processes
}

// fromProcess explains a failure of which the process wrote down what it saw.
func (o *OOM) fromProcess(f *recording.Failure) {
	size := sized
	say := func(format string, args ...any) { o.Why = append(o.Why, units.Sprintf(format, args...)) }
	o.Requested, o.Reserved, o.DeviceFree = f.Requested, f.Reserved, f.DeviceFree
	o.Capacity, _ = limitInForce(f)
	need := max(f.Need, f.Requested)
	held := max(f.Allocated+f.Pending, o.Live)
	held -= min(held, away(f))
	if o.FreeInside == 0 {
		o.FreeInside, o.LargestFree = f.Cached, f.Largest
	}
	if o.FreeInside > 0 && o.Pieces > 0 {
		o.Fragmentation = 1 - float64(o.LargestFree)/float64(o.FreeInside)
	}
	others, processes := elsewhere(f)
	over := held + need - min(o.Capacity, held+need) // what is missing even if all that is free could be used
	switch {
	case f.Upstream != "":
		o.Cause = CauseUpstream
		say("The pool's memory is %s, and that ran out: the device itself had %s free.", f.Upstream, size(f.DeviceFree))
	case f.PoolLimit > 0:
		o.Cause = CauseLimit
		say("The pool had reserved %s, and its own limit is %s: with the %s asked for that would have been %s.", size(f.PoolHolds),
			size(f.PoolLimit), size(need), size(f.PoolHolds+need))
		say("%s", raisePool(f))
	case over > 0 && f.Limit > 0 && f.DeviceTotal > 0 && o.Capacity == f.Limit && held+need <= f.Reserved-min(f.Reserved, f.Elsewhere)+f.DeviceFree:
		o.Cause = CauseLimit
		_, from := limitInForce(f)
		say("%s were in use and %s asked for: %s, over %s, which is %s. The device had %s free.", size(held), size(need), size(held+need),
			from, size(f.Limit), size(f.DeviceFree))
	case over > 0 && others >= over:
		o.Cause = CauseProcesses
		who := "another process"
		if processes > 1 {
			who = fmt.Sprintf("%d other processes", processes)
		}
		say("%s were in use and %s asked for: %s, and the device had %s for it, since %s used %s of its %s.", size(held), size(need),
			size(held+need), size(o.Capacity), who, size(others), size(f.DeviceTotal))
	case over > 0:
		o.Cause = CauseCapacity
		say("%s were in use and %s asked for: %s, %s more than the %s that there were. No allocator could have met it.", size(held),
			size(need), size(held+need), size(over), size(o.Capacity))
	case f.Pinned > 0 && o.available()+f.Cached >= need && o.available()+f.Cached-min(f.Pinned, f.Cached) < need:
		o.Cause = CausePinned
		say("%s were free, but %s of that belong to captured graphs, which will use those addresses again: no other request may use them.",
			size(f.Cached), size(f.Pinned))
	case f.Pending >= need && f.Cached+o.available() < need:
		o.Cause = CausePending
		say("%s were given back, but other streams still used them when the request failed.", size(f.Pending))
	case o.LargestFree >= need:
		o.Cause = CauseCached
		say("%s were free in one piece, of %s in all: in another pool or class of sizes, or of a kind of memory that other pools cannot use.",
			size(o.LargestFree), size(o.FreeInside))
	default:
		o.Cause = CauseFragmentation
		say("%s of the %s reserved were free, the largest piece %s, between blocks that are in use.", size(o.FreeInside), size(o.Reserved),
			size(o.LargestFree))
		var passed []string
		for _, s := range f.Steps {
			if strings.HasPrefix(s.Note, "off by the settings") && (s.Stage == "remap" || s.Stage == "lend" || s.Stage == "collect") {
				passed = append(passed, s.Stage)
			}
		}
		if len(passed) > 0 {
			say("The settings leave out steps that make use of such memory: %s.", strings.Join(passed, ", "))
		}
	}
	if over > 0 && f.Upstream == "" && f.PoolLimit == 0 {
		say("%s", takes(held+inUnits(need)-o.Capacity, held))
	}
}

// raisePool says what would have met a request that its pool's own limit was in the way of: whatever the pool does with its memory,
// this much more is enough.
func raisePool(f *recording.Failure) string {
	size := sized
	need := inUnits(max(f.Need, f.Requested))
	text := units.Sprintf("A limit of %s for the pool is enough", size(f.PoolHolds+need))
	available, _ := limitInForce(f)
	available -= min(available, f.Reserved-min(f.Reserved, f.Elsewhere))
	const unit = 2 << 20 // smaller pieces go to no other pool
	available += (f.Cached - min(f.Cached, f.Pinned)) / unit * unit
	if missing := need - min(need, available); f.DeviceTotal > 0 && f.Upstream == "" && missing > 0 {
		text += units.Sprintf(", together with %s less in use elsewhere, as the device, or a limit on all of it, had no more", size(missing))
	}
	if less := need - min(need, f.PoolLimit-min(f.PoolLimit, f.PoolHolds)); need <= f.PoolLimit {
		text += units.Sprintf("; or %s less in use in the pool", size(less))
	}
	return text + "."
}

// takes says what would have met a request for which so much was missing.
func takes(missing, held uint64) string {
	size := sized
	if missing > held {
		return units.Sprintf("It takes %s more: with nothing else in use it would have failed too.", size(missing))
	}
	return units.Sprintf("It takes %s more, or %s less in use at this moment.", size(missing), size(missing))
}

// explainBare explains a failed request of a trace that tells no segments: the requests went to the driver, or to
// another allocator's upstream, and nothing is known of what lay free inside.
func (o *OOM) explainBare() {
	size := sized
	say := func(format string, args ...any) { o.Why = append(o.Why, units.Sprintf(format, args...)) }
	o.FreeInside, o.Pieces, o.LargestFree = 0, 0, 0
	o.Cause = CauseCapacity
	switch {
	case o.DeviceFree == 0:
		say("%s were live and %s more were asked for; the file does not say what was free.", size(o.Live), size(o.Requested))
	case o.DeviceFree < o.Requested:
		say("%s were asked for and the device had %s free, beside the %s that the process had in use.", size(o.Requested), size(o.DeviceFree),
			size(o.Live))
		say("%s", takes(o.Requested-o.DeviceFree, o.Live))
	default:
		o.Cause = CauseLimit
		say("%s were asked for and the device had %s free: a limit that is not in the file was in the way.", size(o.Requested),
			size(o.DeviceFree))
	}
}
