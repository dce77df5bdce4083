package engine

import (
	"slices"
	"time"

	"github.com/cistern-gpu/cistern/internal/deadline"
)

// SetStretch makes little memory several stretches, until the function that it returns is called.
func SetStretch(bytes uint64) (restore func()) {
	old := stretch
	stretch = bytes
	return func() { stretch = old }
}

// Awaits reports whether a thread waits for another one that is calling an observer.
func Awaits(d *Device) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state.observers.publishDone != nil
}

// Publication is what a thread that calls an observer has done so far, as others see it.
type Publication struct {
	Thread, Returned int
	Ended            bool
}

// OldestPublication is the oldest that is under way.
func OldestPublication(d *Device) Publication {
	p := d.state.observers.publishing[0] // the caller has the lock, or nothing changes it
	return Publication{Returned: int(p.returned.Load()), Ended: p.ended.Load()}
}

// Waits is for how many of some turns, each as long as counts of a turn, a request waits for observers of memory, where
// oldest(n) is the oldest publication under way in turn n.
func Waits(turns int, oldest func(n int) Publication) (n int) {
	var w observerWait
	now, threads := time.Now(), map[int]*publication{}
	for ; n < turns; n++ {
		at := oldest(n)
		p := threads[at.Thread]
		if p == nil {
			p = new(publication)
			threads[at.Thread] = p
		}
		p.returned.Store(uint32(at.Returned))
		p.ended.Store(at.Ended)
		if !w.goesOn(p, now) {
			break
		}
		now = now.Add(deadline.Step)
	}
	return n
}

// HoldDevice locks a device as a request does that is in the reclaim stages, until the function that it returns is called.
func HoldDevice(d *Device) (letGo func()) {
	d.mu.Lock()
	return d.mu.Unlock
}

// CaptureBlocked reports whether a capture waits until it can be announced on the device. Where that cannot be seen now it
// does not.
func CaptureBlocked(d *Device) bool {
	return d.timeline.Gate().Blocked()
}

// Tables is how many entries the device's tables of streams and pools have, by name.
func Tables(d *Device) map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := map[string]int{"streams": len(d.state.streams.all), "streams by id": len(d.state.streams.byID), "forgotten": len(d.state.streams.gone), "pools": len(d.state.pools.byNumber), "pools by id": len(d.state.pools.byID),
		"spaces": len(d.state.pools.heaps), "lanes": len(d.state.pools.arenas), "areas": len(d.state.phys.mem.Ranges.All()), "uses": len(d.state.frees.uses.entries), "spares": len(d.state.phys.mem.Spares()), "pools that end": len(d.state.pools.ending), "events of pools": d.journal.Pools.Gone(), "events of streams": d.journal.Streams.Gone()}
	for _, t := range d.state.streams.all {
		waits, events := t.timeline.Size()
		n["waited"] += waits
		n["ring"] += events
	}
	for _, p := range d.state.pools.byNumber {
		if p != nil {
			n["spaces by stream"] += len(*p.heaps.list.Load())
		}
	}
	return n
}

// ForgetStreams dissolves the arenas, and forgets the streams, that may be gone, as when their number has doubled. It says
// how many streams were forgotten, and how many arenas were inherited since it was last called.
func ForgetStreams(d *Device) (forgotten, inherited int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	inherited, d.state.pools.inherited = d.state.pools.inherited, 0
	d.state.endings.dissolveIdle()
	before := len(d.state.streams.byID)
	d.state.endings.forgetStreams()
	return before - len(d.state.streams.byID), inherited
}

// LiveStreams are the streams that the device knows.
func LiveStreams(d *Device) []*Stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(d.state.streams.live())
}
