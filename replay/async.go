package replay

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
)

func init() {
	Register("torch-async", func(env *Env) (Policy, string, error) {
		conf, err := parseAsync(env.Spec.Conf)
		if err != nil {
			return nil, "", fmt.Errorf("torch-async: %w", err)
		}
		if conf.threshold != noThreshold {
			env.Note(fmt.Sprintf("torch-async: a recording does not say when the program synchronizes, where the pool releases what exceeds its "+
				"threshold: every %v is assumed", conf.interval))
		}
		env.Note("torch-async: the driver's pool is closed source: growth, fit and trimming follow its documentation and were not checked against recordings")
		return newAsync(env, conf), conf.String(), nil
	})
}

// asyncConf is the settings of policy torch-async. PyTorch sets the threshold to the largest number; a program can change it with
// cudaMemPoolSetAttribute.
type asyncConf struct {
	threshold uint64        // reserved bytes above which the pool releases memory at a synchronization
	interval  time.Duration // between the program's synchronizations
}

const (
	noThreshold     = ^uint64(0)
	defaultInterval = 100 * time.Millisecond
)

// parseAsync reads "release_threshold:2GiB,sync_interval:1s".
func parseAsync(text string) (asyncConf, error) {
	c := asyncConf{noThreshold, defaultInterval}
	if text == "" {
		return c, nil
	}
	for item := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(item, ":")
		var err error
		switch key {
		case "release_threshold":
			c.threshold, err = units.ParseBytes(value)
		case "sync_interval":
			if c.interval, err = time.ParseDuration(value); err == nil && c.interval < time.Microsecond {
				err = errors.New("expected a time of 1µs or more")
			}
		default:
			return c, fmt.Errorf("unknown setting %q: the keys are release_threshold, sync_interval", key)
		}
		if err != nil {
			return c, fmt.Errorf("setting %s: %w", item, err)
		}
	}
	return c, nil
}

// String is the settings that are not the defaults.
func (c asyncConf) String() string {
	var items []string
	if c.threshold != noThreshold {
		items = append(items, fmt.Sprintf("release_threshold:%d", c.threshold))
	}
	if c.interval != defaultInterval {
		items = append(items, "sync_interval:"+c.interval.String())
	}
	return strings.Join(items, ",")
}

// asyncGrowth is the step in bytes by which the driver's memory pool was seen to grow.
const asyncGrowth = 32 * mib

// async models PyTorch with backend:cudaMallocAsync: every request is a cuMemAllocAsync from the device's default
// memory pool, with an unlimited release threshold (unless the settings name one) and all three reuse policies on (c10/cuda/
// CUDAMallocAsyncAllocator.cpp). What the pool does inside is not public. Modelled is what the documentation promises:
// memory freed on a stream is reused on it at once; memory freed on another stream is reused too, with a dependency
// that the driver inserts where that stream has not got there yet; nothing goes back to the driver until a request
// cannot be met otherwise, and then all that is wholly free, after waiting for the device. Growth is in steps of
// 32 MiB, fit is best fit, and physical memory is not remapped, which the driver may do.
//
// At a synchronization the pool releases what exceeds its threshold, of segments that are wholly free. The program's
// synchronizations are not in a recording: one is assumed at every asyncConf.interval, and its wait is not the allocator's.
//
// The capacity limits the memory that the pool holds. (PyTorch's own process limit counts requested bytes for this
// backend; a device that runs out does not.)
type async struct {
	meter
	env     *Env
	arena   arena
	stream  []uint32 // by block number
	request []int64  // by block number: the operation that asked for the free
	op      int64
	conf    asyncConf
	synced  int64 // how many intervals of the program's synchronizations have passed
}

func newAsync(env *Env, conf asyncConf) *async {
	n := env.Plan.Blocks
	// One list more: blocks that several streams used are freed on a stream of PyTorch's own.
	return &async{meter: newMeter(env.GPULag), env: env, conf: conf, arena: newArena(n, env.Plan.numStreams()+1),
		stream: make([]uint32, n), request: make([]int64, n)}
}

// Alloc is Policy.Alloc.
func (a *async) Alloc(b int, size uint64, stream, pool uint32) (uint64, error) {
	a.op++
	size = roundUp(size, minBlock)
	a.count(callMemAllocAsync, a.costs.MallocAsync(size))
	i := a.arena.take(int32(stream), size)
	for list := range a.arena.lists {
		if i >= 0 {
			break
		}
		if list%64 == 0 {
			a.search(1)
		}
		if list != int(stream) && a.arena.lists[list].len() > 0 {
			a.search(1)
			i = a.arena.take(int32(list), size)
		}
	}
	if i < 0 {
		i = a.grown(size, stream, pool)
	}
	if i < 0 {
		a.count(callMemGetInfo, a.costs.MemGetInfo)
		a.ooms++
		return 0, fmt.Errorf("cuMemAllocAsync of %d bytes with %d reserved, capacity %d: %w", size, a.reserved, a.env.Capacity, cuda.ErrOutOfMemory)
	}
	a.arena.of[b], a.stream[b] = i, stream
	a.allocated += size
	return a.arena.blocks[i].addr, nil
}

// grown is a block of a new segment, or -1. What the driver does inside takes time and is no call of the program.
func (a *async) grown(size uint64, stream, pool uint32) int32 {
	held := roundUp(size, asyncGrowth)
	if limit := a.env.Capacity; limit > 0 && a.reserved+held > limit {
		a.waitAndTrim()
		a.retries++
		if a.reserved+held > limit {
			return -1
		}
	}
	a.time += a.costs.MemCreate(held) + a.costs.MemMap(held) + a.costs.MemSetAccess(held, 1)
	a.grow(held)
	i := a.arena.segment(held)
	a.env.emitSegment(event.SegmentAlloc, a.arena.blocks[i].addr, held, stream, pool)
	a.arena.cut(i, size, int32(stream))
	return i
}

// waitAndTrim gives back all that is wholly free, after waiting for the device.
func (a *async) waitAndTrim() {
	a.deviceSyncs++
	a.waitForGPU()
	a.trim(0)
}

// Advance is Policy.Advance.
func (a *async) Advance(us int64) {
	a.meter.Advance(us)
	interval := a.conf.interval.Microseconds()
	if n := a.nowUS / interval; n > a.synced {
		a.env.mean.until((a.synced+1)*interval, a.reserved)
		a.synced = n
		a.trim(a.conf.threshold)
	}
}

// trim gives back segments that are wholly free, whatever streams their parts were freed on, while more than keep bytes are held.
func (a *async) trim(keep uint64) {
	if a.reserved <= keep {
		return
	}
	a.search(len(a.arena.lists))
	for list := range a.arena.lists {
		a.search(a.arena.lists[list].len())
		for _, i := range a.arena.lists[list].blocks() {
			if a.reserved <= keep {
				return
			}
			if a.arena.blocks[i].free && int(a.arena.blocks[i].list) == list && a.arena.blocks[i].prev < 0 {
				a.trimSegment(i)
			}
		}
	}
}

// trimSegment gives back the segment that begins with free block i, if all of it is free.
func (a *async) trimSegment(i int32) {
	for j := i; j >= 0; j = a.arena.blocks[j].next {
		a.search(1)
		if !a.arena.blocks[j].free {
			return
		}
	}
	list := a.arena.blocks[i].list
	for n := a.arena.blocks[i].next; n >= 0; n = a.arena.blocks[i].next {
		a.arena.join(i, n)
		a.arena.give(i, list)
	}
	b := a.arena.blocks[i]
	a.time += a.costs.MemUnmap(b.size) + a.costs.MemRelease(b.size)
	a.shrink(b.size)
	a.env.emitSegment(event.SegmentFree, b.addr, b.size, 0, 0)
	a.arena.drop(i)
}

// FreeRequested is Policy.FreeRequested.
func (a *async) FreeRequested(b int) {
	a.op++
	a.request[b] = a.op
}

// Free is Policy.Free. A block that was not free at once had been used by several streams: it is freed on a stream of
// PyTorch's own, which is made to wait for all of them.
func (a *async) Free(b int) error {
	i, err := a.arena.used(b)
	if err != nil {
		return err
	}
	list := int32(a.stream[b])
	if a.request[b] != 0 && a.request[b] != a.op {
		list = int32(len(a.arena.lists) - 1)
		// The streams are not in a trace: the allocating one and one more are counted.
		for range 2 {
			a.count(callEventCreate, a.costs.EventCreate)
			a.count(callEventRecord, a.costs.EventRecord)
			a.count(callStreamWaitEvent, a.costs.StreamWaitEvent)
		}
	}
	a.op++
	size := a.arena.blocks[i].size
	a.count(callMemFreeAsync, a.costs.FreeAsync(size))
	a.allocated -= size
	a.arena.give(i, list)
	return nil
}

// EmptyCache is torch.cuda.empty_cache, which trims the pool.
func (a *async) EmptyCache() error {
	a.waitAndTrim()
	return nil
}

// ReleasePool does nothing: with this backend private pools share the device's memory pool.
func (a *async) ReleasePool(uint32) error { return nil }
