package analyze

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/cistern-gpu/cistern/recording"
)

// Held are the allocations at one moment. Each list sums up to Requested; Requested, Rounding and Unknown to Allocated.
type Held struct {
	Allocated uint64 `json:"allocated_bytes"`
	Requested uint64 `json:"requested_bytes"`
	Rounding  uint64 `json:"rounding_bytes"`
	Unknown   uint64 `json:"unattributed_bytes"` // allocated by blocks that the history does not have
	Pending   uint64 `json:"pending_bytes"`      // of Requested: given back, still used by other streams
	Blocks    int    `json:"blocks"`

	Stack   []Share `json:"by_stack"` // the most bytes first, as the others but Size and Age, which are in order
	Tag     []Share `json:"by_tag"`   // empty where nothing is tagged; so are Library and Thread
	Library []Share `json:"by_library"`
	Thread  []Share `json:"by_thread"`
	Pool    []Share `json:"by_pool"`
	Stream  []Share `json:"by_stream"`
	Size    []Share `json:"by_size"`
	Age     []Share `json:"by_age"`
}

// Share is what one of a kind held.
type Share struct {
	Named           // of a stack by NameStacks
	Blocks int      `json:"blocks"`
	Bytes  uint64   `json:"bytes"` // requested
	Frames []string `json:"frames,omitempty"`
	// Rest: not one of a kind, but all that are not listed.
	Rest bool `json:"rest,omitempty"`
}

// heldAfter sums up the allocations in the state after event i. allocated is what the process said; 0 is as much as the
// blocks come to, rounded.
func heldAfter(t *recording.Trace, i int, s *state, allocated uint64) Held {
	h := Held{Blocks: len(s.live)}
	lists := map[*[]Share]*sums{}
	add := func(list *[]Share, known bool, key uint64, bytes uint64) {
		s := lists[list]
		if s == nil {
			s = &sums{by: map[uint64]*Share{}}
			lists[list] = s
		}
		s.known = s.known || known
		s.add(key, bytes)
	}
	libraries, askers := names{ids: map[string]uint64{}}, map[[2]uint32]uint64{}
	now := timeOf(t, i)
	rounded := uint64(0)
	for _, b := range s.live {
		h.Requested += b.size
		rounded += roundUp(b.size)
		if b.pending {
			h.Pending += b.size
		}
		add(&h.Stack, true, uint64(b.stack), b.size)
		add(&h.Tag, b.tag != 0, uint64(b.tag), b.size)
		asker := [2]uint32{uint32(b.library), b.stack}
		library, ok := askers[asker]
		if !ok {
			library = libraries.of(BlockLibrary(t, b.library, b.stack))
			askers[asker] = library
		}
		add(&h.Library, libraries.names[library] != UnknownLibrary, library, b.size)
		add(&h.Thread, b.thread != 0, uint64(b.thread), b.size)
		add(&h.Pool, true, uint64(b.pool), b.size)
		add(&h.Stream, true, uint64(b.stream), b.size)
		add(&h.Size, true, uint64(slices.IndexFunc(sizeLimits, func(limit uint64) bool { return limit == 0 || b.size <= limit })), b.size)
		age := uint64(len(ages))
		if b.since >= 0 {
			took := now - timeOf(t, b.since)
			age = uint64(slices.IndexFunc(ages, func(limit int64) bool { return limit == 0 || took < limit }))
		}
		add(&h.Age, true, age, b.size)
	}
	h.Allocated = allocated
	if allocated == 0 {
		h.Allocated = rounded
	}
	// The blocks of the history may come to more than was allocated: one that lost its end.
	h.Allocated = max(h.Allocated, h.Requested)
	h.Rounding = min(rounded-h.Requested, h.Allocated-h.Requested)
	h.Unknown = h.Allocated - h.Requested - h.Rounding
	if h.Unknown < uint64(h.Blocks+1)*grain { // an allocator that rounds a little more
		h.Rounding, h.Unknown = h.Rounding+h.Unknown, 0
	}

	fill := func(list *[]Share, what string, name func(key uint64) string) {
		if s := lists[list]; s != nil {
			*list = s.list(what, name)
		}
	}
	lists[&h.Stack].describe(t)
	fill(&h.Stack, "stack", func(k uint64) string { return lists[&h.Stack].by[k].Name })
	fill(&h.Tag, "tag", func(k uint64) string { return cmp.Or(t.TagName(uint16(k)), NoTag) })
	fill(&h.Library, "library", func(k uint64) string { return libraries.names[k] })
	fill(&h.Thread, "thread", func(k uint64) string { return cmp.Or(t.ThreadName(uint32(k)), NoThread) })
	fill(&h.Pool, "pool", func(k uint64) string { return poolName(t, uint32(k)) })
	fill(&h.Stream, "stream", func(k uint64) string { return streamName(t, uint32(k)) })
	fill(&h.Size, "", func(k uint64) string { return sizeLabel(int(k)) })
	fill(&h.Age, "", func(k uint64) string { return ageLabels[k] })
	return h
}

// names numbers what is known by name.
type names struct {
	ids   map[string]uint64
	names []string
}

func (n *names) of(name string) uint64 {
	id, ok := n.ids[name]
	if !ok {
		id = uint64(len(n.names))
		n.ids[name] = id
		n.names = append(n.names, name)
	}
	return id
}

// sums are the shares of one kind.
type sums struct {
	by    map[uint64]*Share
	known bool // some block says something of it
}

func (s *sums) add(key, bytes uint64) {
	x := s.by[key]
	if x == nil {
		x = &Share{}
		s.by[key] = x
	}
	x.Blocks++
	x.Bytes += bytes
}

// describe names stacks, and adds their frames.
func (s *sums) describe(t *recording.Trace) {
	if s == nil {
		return
	}
	keys := slices.Sorted(maps.Keys(s.by))
	stacks := make([][]recording.Frame, len(keys))
	for i, k := range keys {
		stacks[i] = t.FramesOf(uint32(k))
	}
	for i, n := range NameStacks(stacks) {
		x := s.by[keys[i]]
		x.Frames = frameTexts(stacks[i])
		x.Named = n.words(stacks[i])
	}
}

// list is the shares, the most bytes first and the rest in one beyond MaxHolders; in the order of their keys where
// there is no word for what they are.
func (s *sums) list(what string, name func(key uint64) string) []Share {
	if !s.known {
		return nil
	}
	keys := make([]uint64, 0, len(s.by))
	for k := range s.by {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b uint64) int {
		if what == "" {
			return cmp.Compare(a, b)
		}
		return cmp.Or(cmp.Compare(s.by[b].Bytes, s.by[a].Bytes), cmp.Compare(a, b))
	})
	var all []Share
	for i, k := range keys {
		x := s.by[k]
		if i >= MaxHolders {
			last := &all[len(all)-1]
			if i == MaxHolders {
				all = append(all, Share{Named: Named{Name: fmt.Sprintf("%d others by %s", len(keys)-MaxHolders, what)}, Rest: true})
				last = &all[MaxHolders]
			}
			last.Blocks += x.Blocks
			last.Bytes += x.Bytes
			continue
		}
		x.Name = name(k)
		all = append(all, *x)
	}
	return all
}

func poolName(t *recording.Trace, pool uint32) string {
	if int(pool) < len(t.Pools) && t.Pools[pool] != (recording.PoolID{}) {
		return fmt.Sprintf("pool %d,%d", t.Pools[pool][0], t.Pools[pool][1])
	}
	return "the default pool"
}

func streamName(t *recording.Trace, stream uint32) string {
	if int(stream) >= len(t.Streams) {
		return "unknown"
	}
	if id := t.Streams[stream]; id >= 1<<16 { // a handle
		return fmt.Sprintf("%#x", id)
	}
	return fmt.Sprint(t.Streams[stream])
}

// ages end the classes of age, in microseconds; the last has no end. Beyond them is what was live before the first event.
var ages = []int64{1e4, 1e5, 1e6, 1e7, 6e7, 6e8, 36e8, 0}

var ageLabels = []string{"under 10 ms", "under 100 ms", "under 1 s", "under 10 s", "under 1 min", "under 10 min", "under 1 h",
	"older than 1 h", "before the recording"}

// UsefulFrame is the frame of a stack that says most of what the memory is for (recording.Telling).
func UsefulFrame(t *recording.Trace, stack uint32) string {
	frames := t.FramesOf(stack)
	if i := recording.Telling(frames); i >= 0 {
		return frames[i].String()
	}
	return NoStack
}
