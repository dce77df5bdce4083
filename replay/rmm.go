package replay

import (
	"fmt"
	"strings"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
)

func init() {
	Register("rmm-pool", func(env *Env) (Policy, string, error) {
		conf, err := parseRMMConf(env.Spec.Conf)
		if err != nil {
			return nil, "", err
		}
		r, err := newRMM(env, conf)
		if err != nil {
			return nil, "", err
		}
		return r, conf.String(), nil
	})
}

// rmmConf is the settings of RMM's pool_memory_resource, named as its constructor names them. A pool without an
// initial size grows from nothing; RMM's Python default is half of the device's free memory, which a trace does not
// say.
type rmmConf struct {
	initial, maximum uint64 // bytes; maximum 0 is none
}

func parseRMMConf(s string) (rmmConf, error) {
	var c rmmConf
	if s == "" || s == "default" {
		return c, nil
	}
	for _, item := range strings.Split(s, ",") {
		key, value, _ := strings.Cut(strings.TrimSpace(item), ":")
		n, err := units.ParseBytes(value)
		switch key {
		case "initial_pool_size":
			c.initial = n
		case "maximum_pool_size":
			c.maximum = n
		default:
			return c, fmt.Errorf("rmm-pool: unknown key %q: the keys are initial_pool_size, maximum_pool_size", key)
		}
		if err != nil {
			return c, fmt.Errorf("rmm-pool: %s: %w", key, err)
		}
		if n%rmmAlign != 0 {
			return c, fmt.Errorf("rmm-pool: %s: %d bytes: expected a multiple of %d", key, n, rmmAlign)
		}
	}
	if c.maximum > 0 && c.initial > c.maximum {
		return c, fmt.Errorf("rmm-pool: initial_pool_size: %d exceeds maximum_pool_size, %d", c.initial, c.maximum)
	}
	return c, nil
}

// String is the settings as parseRMMConf reads them.
func (c rmmConf) String() string {
	var parts []string
	if c.initial > 0 {
		parts = append(parts, fmt.Sprintf("initial_pool_size:%d", c.initial))
	}
	if c.maximum > 0 {
		parts = append(parts, fmt.Sprintf("maximum_pool_size:%d", c.maximum))
	}
	if parts == nil {
		return "default"
	}
	return strings.Join(parts, ",")
}

// rmmAlign is rmm::CUDA_ALLOCATION_ALIGNMENT in bytes.
const rmmAlign = 256

// rmm models RMM's pool_memory_resource over cuMemAlloc (rapidsai/rmm: pool_memory_resource_impl,
// stream_ordered_memory_resource, coalescing_free_list), written from its source and not held against a recording.
// Every stream has a list of free blocks, best fit, lowest address first; a request looks in its own, then in those of
// others with an event wait, then merges them into its own one by one, then grows the pool by as much as it has (half
// of what is left, where there is a maximum), halving that while the driver refuses. Nothing goes back before the end.
// RMM visits other streams in the order of their events' addresses; here it is the order in which they came.
type rmm struct {
	meter
	env    *Env
	conf   rmmConf
	arena  arena
	order  []int32  // streams that have a list, in the order of their first use
	known  []bool   // whether a stream is in order
	events []bool   // whether a stream has its event
	stream []uint32 // by block number
	pool   uint64   // current_pool_size_
}

func newRMM(env *Env, conf rmmConf) (*rmm, error) {
	n := env.Plan.numStreams()
	r := &rmm{meter: newMeter(env.GPULag), env: env, conf: conf, arena: newArena(env.Plan.Blocks, n+1),
		known: make([]bool, n+1), events: make([]bool, n+1), stream: make([]uint32, env.Plan.Blocks)}
	if conf.initial > 0 {
		// The initial block belongs to the legacy default stream: the recorded stream 0 where there is one.
		i := r.upstream(conf.initial, 0)
		if i < 0 {
			return nil, fmt.Errorf("rmm-pool: initial_pool_size: %d bytes exceed the capacity, %d", conf.initial, env.Capacity)
		}
		list := int32(n)
		for s, h := range env.Plan.Trace.Streams {
			if h == 0 {
				list = int32(s)
			}
		}
		r.use(list)
		r.arena.give(i, list)
	}
	return r, nil
}

// use makes the list of a stream known.
func (r *rmm) use(list int32) {
	if !r.known[list] {
		r.known[list] = true
		r.order = append(r.order, list)
	}
	if !r.events[list] {
		r.events[list] = true
		r.count(callEventCreate, r.costs.EventCreate)
	}
}

// upstream is block_from_upstream: a segment from the driver, -1 where it refuses.
func (r *rmm) upstream(size uint64, stream uint32) int32 {
	held := roundUp(size, roundLarge)
	if r.env.Capacity > 0 && r.reserved+held > r.env.Capacity {
		r.count(callMemAlloc, r.costs.MemAlloc(0)) // the refusal
		return -1
	}
	i := r.arena.segment(size)
	r.memAlloc(held)
	r.pool += size
	r.env.emitSegment(event.SegmentAlloc, r.arena.blocks[i].addr, held, stream, 0)
	return i
}

// Alloc is stream_ordered_memory_resource::allocate.
func (r *rmm) Alloc(b int, size uint64, stream, pool uint32) (uint64, error) {
	size = roundUp(size, rmmAlign)
	list := int32(stream)
	r.use(list)
	i := r.arena.take(list, size)
	if i < 0 {
		i = r.steal(list, size)
	}
	if i < 0 {
		i = r.expand(list, size, stream)
	}
	if i < 0 {
		r.ooms++
		return 0, fmt.Errorf("request of %d bytes with a pool of %d, capacity %d: %w", size, r.pool, r.env.Capacity, cuda.ErrOutOfMemory)
	}
	r.arena.of[b], r.stream[b] = i, stream
	r.allocated += size
	return r.arena.blocks[i].addr, nil
}

// steal is get_block_from_other_stream, without and with merging.
func (r *rmm) steal(list int32, size uint64) int32 {
	r.search(len(r.order))
	for _, other := range r.order {
		if other == list {
			continue
		}
		if i := r.arena.take(other, size); i >= 0 {
			r.count(callStreamWaitEvent, r.costs.StreamWaitEvent)
			return i
		}
	}
	for k := 0; k < len(r.order); {
		other := r.order[k]
		if other == list {
			k++
			continue
		}
		r.count(callStreamWaitEvent, r.costs.StreamWaitEvent)
		r.search(r.arena.lists[other].len())
		for _, i := range r.arena.lists[other].blocks() {
			blk := &r.arena.blocks[i]
			r.arena.lists[other].remove(blk.size, blk.addr, i)
			blk.free = false
			r.arena.give(i, list)
		}
		r.order = append(r.order[:k], r.order[k+1:]...)
		r.known[other] = false
		if i := r.arena.take(list, size); i >= 0 {
			return i
		}
	}
	return -1
}

// expand is expand_pool and try_to_expand.
func (r *rmm) expand(list int32, size uint64, stream uint32) int32 {
	try := max(size, r.pool)
	if r.conf.maximum > 0 {
		rest := r.conf.maximum - r.pool
		if size > rest {
			return -1
		}
		try = max(size, roundUp(rest/2, rmmAlign))
	}
	for {
		if i := r.upstream(try, stream); i >= 0 {
			r.arena.cut(i, size, list)
			return i
		}
		if try == size {
			return -1
		}
		try = max(size, try/2/rmmAlign*rmmAlign)
	}
}

// FreeRequested is Policy.FreeRequested.
func (r *rmm) FreeRequested(int) {}

// Free is stream_ordered_memory_resource::deallocate, on the stream of the allocation.
func (r *rmm) Free(b int) error {
	i, err := r.arena.used(b)
	if err != nil {
		return err
	}
	list := int32(r.stream[b])
	r.use(list)
	r.count(callEventRecord, r.costs.EventRecord)
	r.allocated -= r.arena.blocks[i].size
	r.arena.give(i, list)
	return nil
}
