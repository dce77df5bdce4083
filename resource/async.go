package resource

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/cistern-gpu/cistern/cuda"
)

// Reuse says how a pool of the driver's may hand out again what was freed on another stream. The zero value is the
// driver's own choice, which is all three.
type Reuse uint8

const (
	ReuseFollow        Reuse = 1 << iota // where an event orders the free before the allocation
	ReuseOpportunistic                   // where the GPU happens to be done with it
	ReuseInternal                        // where the driver adds the order itself
	ReuseNone                            // not at all; not together with the others
)

// Unlimited is a release threshold that keeps everything.
const Unlimited = math.MaxUint64

// AsyncOptions describe a pool of stream-ordered memory. Sizes are in bytes.
type AsyncOptions struct {
	// Threshold is what the pool keeps at a synchronisation; more than that goes back to the device. CUDA's own, and
	// the zero value, is to keep nothing. Unlimited keeps everything.
	Threshold uint64
	// Initial is got from the device at once. It is at most Threshold, else it would be given back at once.
	Initial uint64
	// Max bounds what the pool holds; 0 is no bound of its own. Beyond, requests are out of memory.
	Max   uint64
	Reuse Reuse
	// Handles is in what way the pool can be exported: one type, or none.
	Handles cuda.HandleType
}

// AsyncPool is memory from a pool of the driver's, in the order of streams (cuMemAllocFromPoolAsync): Free may come
// before the GPU is done. On a stream that is being captured a request becomes a node of the graph, which is the
// caller's to avoid. The engine never calls it on a stream of its users': see HostOrdered.
type AsyncPool struct {
	drv     cuda.Driver
	dev     cuda.Device
	pool    cuda.MemPool
	handles cuda.HandleType
	own     bool        // Close destroys it
	stream  cuda.Stream // that could not be destroyed before; Close tries again
	closing atomic.Bool // Close was called while memory was out: the last Free destroys the pool
}

// Async makes a pool. It is destroyed by Close, once all its memory is back.
func Async(drv cuda.Driver, dev cuda.Device, o AsyncOptions) (*AsyncPool, error) {
	switch {
	case o.Initial > o.Threshold:
		return nil, fmt.Errorf("async: an initial size of %d bytes is above the threshold of %d, so it would be returned at once", o.Initial, o.Threshold)
	case o.Max != 0 && o.Initial > o.Max:
		return nil, fmt.Errorf("async: an initial size of %d bytes is above the maximum of %d", o.Initial, o.Max)
	case o.Reuse&ReuseNone != 0 && o.Reuse != ReuseNone:
		return nil, errors.New("async: reuse none excludes other kinds of reuse")
	}
	if err := supportsPools(drv, dev, o.Handles); err != nil {
		return nil, err
	}
	pool, err := drv.MemPoolCreate(cuda.MemPoolProps{Device: dev, Handles: o.Handles, MaxSize: o.Max})
	if err != nil {
		return nil, err
	}
	a := &AsyncPool{drv: drv, dev: dev, pool: pool, handles: o.Handles, own: true}
	if err := a.set(o); err != nil {
		return nil, both(err, a.Close())
	}
	return a, nil
}

// AsyncView is a pool with another owner; nothing of it is changed.
func AsyncView(drv cuda.Driver, dev cuda.Device, pool cuda.MemPool) *AsyncPool {
	return &AsyncPool{drv: drv, dev: dev, pool: pool}
}

// AsyncDefault is a view of the device's own pool, which cudaMallocAsync uses.
func AsyncDefault(drv cuda.Driver, dev cuda.Device) (*AsyncPool, error) {
	if err := supportsPools(drv, dev, cuda.HandleNone); err != nil {
		return nil, err
	}
	pool, err := drv.MemPoolDefault(dev)
	if err != nil {
		return nil, err
	}
	return AsyncView(drv, dev, pool), nil
}

func supportsPools(drv cuda.Driver, dev cuda.Device, handles cuda.HandleType) error {
	info, err := drv.DeviceInfo(dev)
	switch {
	case err != nil:
		return err
	case !info.Pools:
		return fmt.Errorf("device %d (%s) does not support stream-ordered memory", dev, info.Name)
	case handles&^info.PoolHandles != 0:
		return fmt.Errorf("device %d (%s) does not support pools with handles of type %d", dev, info.Name, handles)
	}
	return drv.RetainContext(dev)
}

func (a *AsyncPool) set(o AsyncOptions) error {
	if o.Threshold != 0 {
		if err := a.drv.MemPoolSet(a.dev, a.pool, cuda.MemPoolReleaseThreshold, o.Threshold); err != nil {
			return err
		}
	}
	if o.Reuse != 0 {
		for flag, attr := range map[Reuse]cuda.MemPoolAttr{ReuseFollow: cuda.MemPoolReuseFollowEventDependencies,
			ReuseOpportunistic: cuda.MemPoolReuseAllowOpportunistic, ReuseInternal: cuda.MemPoolReuseAllowInternal} {
			var on uint64
			if o.Reuse&flag != 0 {
				on = 1
			}
			if err := a.drv.MemPoolSet(a.dev, a.pool, attr, on); err != nil {
				return err
			}
		}
	}
	if o.Initial == 0 {
		return nil
	}
	// On a stream of its own, as the program's may be captured.
	s, err := a.drv.StreamCreate(a.dev, false)
	if err != nil {
		return err
	}
	p, err := a.drv.MemAllocAsync(a.dev, o.Initial, a.pool, s)
	if err == nil {
		err = a.drv.MemFreeAsync(a.dev, p, s)
		waited := a.drv.StreamSynchronize(a.dev, s)
		if err != nil {
			_ = a.drv.MemFree(a.dev, p) // else nothing would
		}
		err = both(err, waited)
	}
	if a.drv.StreamDestroy(a.dev, s) != nil {
		a.stream = s
	}
	return err
}

// Pool is the driver's handle of the pool.
func (a *AsyncPool) Pool() cuda.MemPool { return a.pool }

// Alloc gets memory that work queued on st from now on may use.
func (a *AsyncPool) Alloc(size, align uint64, st cuda.Stream) (cuda.Ptr, error) {
	if size == 0 {
		return 0, nil
	}
	if err := Check("async", a.dev, size, align, natural); err != nil {
		return 0, err
	}
	return a.drv.MemAllocAsync(a.dev, size, a.pool, st)
}

// Free gives memory back once the work queued on st so far is done.
func (a *AsyncPool) Free(p cuda.Ptr, _, _ uint64, st cuda.Stream) error {
	if p == 0 {
		return nil
	}
	err := a.drv.MemFreeAsync(a.dev, p, st)
	if err == nil && a.closing.Load() && a.drv.StreamSynchronize(a.dev, st) == nil {
		err = a.destroy()
	}
	return err
}

// destroy destroys a pool that is to be closed, if no memory of it is out. libcuda 580 dies at the end of a pool of another device
// after that of one whose memory outlived it (lab/native/pools2.c), also where a free was only under way: a caller with several
// devices waits for its frees before Close. Here it cannot be waited for, as a capture forbids that.
func (a *AsyncPool) destroy() error {
	a.closing.Store(true)
	if used, err := a.drv.MemPoolGet(a.dev, a.pool, cuda.MemPoolUsedCurrent); err != nil || used > 0 || !a.closing.CompareAndSwap(true, false) {
		return err
	}
	return a.drv.MemPoolDestroy(a.dev, a.pool)
}

// Usage is what the pool holds of the device's memory and what of it is in use, in bytes.
func (a *AsyncPool) Usage() (reserved, used uint64, err error) {
	if reserved, err = a.drv.MemPoolGet(a.dev, a.pool, cuda.MemPoolReservedCurrent); err != nil {
		return 0, 0, err
	}
	used, err = a.drv.MemPoolGet(a.dev, a.pool, cuda.MemPoolUsedCurrent)
	return reserved, used, err
}

// Trim gives back to the device what the GPU is done with and is not in use.
func (a *AsyncPool) Trim() error { return a.drv.MemPoolTrim(a.dev, a.pool, 0) }

// EnablePeer opens the pool's memory, got before or later, to another device.
func (a *AsyncPool) EnablePeer(peer cuda.Device) error {
	if peer == a.dev {
		return nil
	}
	return a.drv.MemPoolSetAccess(a.dev, a.pool, []cuda.Device{peer})
}

// Close destroys the pool, unless it is a view. Memory that is still out stays valid until it is freed, and the pool goes with the last
// of it.
func (a *AsyncPool) Close() error {
	if a.stream != 0 {
		if err := a.drv.StreamDestroy(a.dev, a.stream); err != nil {
			return err
		}
		a.stream = 0
	}
	if !a.own {
		return nil
	}
	if err := a.destroy(); err != nil {
		a.closing.Store(false)
		return err
	}
	a.own = false
	return nil
}

func (a *AsyncPool) MemInfo() (free, total uint64, err error) { return a.drv.MemInfo(a.dev) }

// Equal reports whether it is the same pool.
func (a *AsyncPool) Equal(other Resource) bool {
	o, ok := other.(*AsyncPool)
	return ok && o.drv == a.drv && o.dev == a.dev && o.pool == a.pool
}

func (a *AsyncPool) Traits() Traits {
	return Traits{Name: "async", Device: a.dev, OnDevice: true, DeviceAccessible: true, StreamOrdered: true, Align: natural,
		Handles: a.handles}
}
