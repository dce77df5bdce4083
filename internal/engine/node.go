package engine

import (
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/engine/quota"
	"github.com/cistern-gpu/cistern/internal/lockrank"
	"github.com/cistern-gpu/cistern/memory"
)

// Node is the other processes on the devices, through the node's broker.
type Node interface {
	// Admit reports whether the driver may be asked for size bytes of new memory without taking what other processes were
	// granted. It is called with locks held, and neither waits nor calls the engine.
	Admit(dev cuda.Device, size uint64) bool
	// Ask asks other processes to release need bytes, and returns how many they released for this process, and words for the
	// report of a failed request. It waits for so long at most for memory that others do not use any more soon, and is bounded in
	// time beside that. No lock is held.
	Ask(dev cuda.Device, need uint64, wait time.Duration) (granted uint64, note string)
	// Done ends what Ask granted: the request that asked is over, met or not. No lock is held.
	Done(dev cuda.Device, granted uint64)
	// Grown is told that the driver was asked for new memory. It may ask other processes to release some, so that the driver keeps
	// what libraries load. No lock is held.
	Grown(dev cuda.Device)
}

// SetNode sets the other processes of all devices (nil: none). Requests may be under way: those that have asked the node
// before end what it granted there.
func (a *Allocator) SetNode(n Node) {
	if n == nil {
		a.node.Store(nil)
		return
	}
	a.node.Store(&n)
}

// SetNodeLimit is a limit of a device beside that of Device.SetLimit, which the policy of the node's broker sets. The lower one is in
// force. A device that is not in use has none.
func (a *Allocator) SetNodeLimit(dev cuda.Device, bytes uint64) {
	if d, ok := a.Started(dev); ok {
		d.mu.Lock()
		d.state.phys.quota.SetLimit(quota.LimitNode, bytes)
		d.mu.Unlock()
	}
}

// MakeRoom is for memory that another process makes for this one, and lacked: unused memory of the device goes to the driver, then other
// processes are asked for what is still lacking. note says what came of that. Where ok is true it is worth trying again, for a moment, as
// released memory comes late; done, which is never nil, is to be called after that.
func (sh *Sharing) MakeRoom(dev cuda.Device, bytes uint64) (done func(), ok bool, note string) {
	done = func() {}
	d, err := sh.a.Device(dev)
	if err != nil {
		return done, false, err.Error()
	}
	// One chunk of the largest size at least, as what the driver has free need not do for one.
	least := min(bytes, d.opts.ChunkMax)
	own, err := d.GiveBack(max(less(bytes, freeOf(d)), least), 0)
	if err != nil {
		return done, false, err.Error()
	}
	short := less(bytes, freeOf(d))
	if own > 0 && short == 0 {
		return done, true, ""
	}
	n := sh.a.node.Load()
	if n == nil {
		return done, own > 0, "no other process was asked, as this one is no client of the broker"
	}
	lockrank.MayCall()
	granted, note := (*n).Ask(dev, max(short, least), d.opts.NodeWait)
	if granted > 0 {
		done = func() { (*n).Done(dev, granted) }
	}
	return done, own > 0 || granted > 0, note
}

// freeOf is what the driver says is free of the device; 0 where it does not.
func freeOf(d *Device) uint64 {
	free, _, err := d.drv.MemInfo(d.id)
	if err != nil {
		return 0
	}
	return free
}

// admit reports whether a driver may be asked for new memory.
func (a *Allocator) admit(dev cuda.Device, size uint64) bool {
	n := a.node.Load()
	return n == nil || (*n).Admit(dev, size)
}

// mostAsks is how often a request asks the node. Memory that another process released comes some milliseconds late (8 ms in
// the median for 1 GiB in chunks of 32 MiB on an H200), so while a grant is open a request that lacks memory grows again, up
// to mostGrows times after each grant, with waits that begin with firstWait and double up to longestWait: 99 ms in all.
const (
	mostAsks    = 2
	mostGrows   = 10
	firstWait   = time.Millisecond
	longestWait = 14 * time.Millisecond
)

// grants is what a request or a resume was granted.
type grants struct {
	open  [mostAsks]grant
	asked int           // how often
	grown int           // how often it grew again since the last grant
	node  Node          // to be told that new memory was got of the driver, nil: none was
	took  time.Duration // questions, all together
}

// grant is what one call of Node.Ask returned.
type grant struct {
	node  Node
	bytes uint64 // 0: nothing
}

// grew notes that the driver's counts differ from those before.
//
// +checklocks:d.gpu.mu
func (g *grants) grew(d *Device, before int64) {
	if n := d.a.node.Load(); n != nil && d.state.phys.counts.DeviceAllocs != before {
		g.node = *n
	}
}

// done ends all grants. No lock is held.
func (g *grants) done(dev cuda.Device) {
	for _, x := range g.open {
		if x.bytes > 0 {
			lockrank.MayCall()
			x.node.Done(dev, x.bytes)
		}
	}
	if g.node != nil {
		lockrank.MayCall()
		g.node.Grown(dev)
	}
}

// mayComeLate reports whether memory that growing lacked was granted, and may come yet.
func mayComeLate(r *reclaimer) bool {
	return r.short > 0 && r.grants.grown < mostGrows && (r.grants.open[0].bytes > 0 || r.grants.open[1].bytes > 0)
}

// awaitGrant waits a moment for granted memory, and reports true: growing is to be tried again.
//
// +checklocks:r.d.gpu.mu
func awaitGrant(r *reclaimer) bool {
	wait := min(firstWait<<r.grants.grown, longestWait)
	r.grants.grown++
	r.log.start()
	r.d.mu.Unlock()
	defer r.d.mu.Lock()
	deadline.Nap(wait)
	r.log.lap(memory.StageNode, 0)
	return true
}

// askNode asks other processes for what growing lacked, where that helps. It reports whether they released any; then all steps
// are taken again.
//
// +checklocks:r.d.gpu.mu
func askNode(r *reclaimer) bool {
	d, g, n := r.d, &r.grants, r.d.a.node.Load()
	if n == nil || r.allowed&memory.StageNode == 0 || g.asked == mostAsks || r.short == 0 || r.scope.limit != nil || !d.state.phys.fits(r.short) {
		return false
	}
	need, s, x := lacking(r, *n), r.log.try(memory.StageNode), &g.open[g.asked]
	x.node = *n
	g.asked++
	g.grown = 0
	r.log.start()
	func() {
		d.mu.Unlock()
		defer d.mu.Lock() // also if Ask panics
		lockrank.MayCall()
		began := time.Now()
		x.bytes, s.note = x.node.Ask(d.id, need, max(d.opts.NodeWait-g.took, 0))
		g.took += time.Since(began)
	}()
	r.log.lap(memory.StageNode, x.bytes)
	if x.bytes == 0 {
		return false
	}
	r.helped |= memory.StageNode
	r.next = [2]uint8{}
	return true
}

// lacking is how much of what growing lacked the driver does not have for this process: one chunk of the largest size at
// least, as what the driver has free need not do for one.
//
// +checklocks:r.d.gpu.mu
func lacking(r *reclaimer, n Node) uint64 {
	free, _, err := r.d.drv.MemInfo(r.d.id)
	usable := min(free, r.short)
	if err != nil || !n.Admit(r.d.id, usable) {
		usable = 0
	}
	return max(r.short-usable, min(r.short, r.d.opts.ChunkMax))
}

// has reports whether the driver says that it has so many bytes free.
func (ph *physical) has(bytes uint64) bool {
	free, _, err := ph.gpu.drv.MemInfo(ph.gpu.id)
	return err == nil && free >= bytes
}

// fits reports whether the device could hold so many bytes more if no other process were on it.
//
// +checklocks:ph.gpu.mu
func (ph *physical) fits(bytes uint64) bool {
	total := ph.gpu.info.TotalBytes
	return bytes <= total && ph.quota.Reserved <= total-bytes
}

// notAsked is why the node was not asked for a request of the pool.
func notAsked(r *reclaimer, p *Pool) string {
	grow := r.log.of(memory.StageGrow)
	switch {
	case r.d.a.node.Load() == nil:
		return "no broker is connected"
	case r.scope.limit != nil || grow.stop == stopLimit || grow.stop == stopPoolLimit:
		return "not asked: a limit is in the way"
	case !p.backing.onDevice():
		return "not asked: the memory is not the device's own"
	case r.short == 0:
		return "not asked: no new memory was lacking"
	}
	return "not asked: the device is not large enough"
}
