package analyze

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
)

// Difference is what two runs hold at a moment of each, and what grew from the first to the second. Its JSON is what
// `cistern diff --json` prints.
type Difference struct {
	At     string   `json:"at"` // "peak" or "end"
	A      Side     `json:"a"`
	B      Side     `json:"b"`
	Stack  []Change `json:"by_stack"` // each largest change first, growth or not
	Size   []Change `json:"by_size"`
	Exact  []Change `json:"by_exact_size"`
	Pool   []Change `json:"by_pool"`
	Stream []Change `json:"by_stream"`
	// Library is by the library that allocated (BlockLibrary).
	Library []Change `json:"by_library"`
	Tag     []Change `json:"by_tag"` // nil where neither run has any
	Notes   []string `json:"notes"`

	// Bare is what was allocated without a stack, by exact size; of Stack it is one entry.
	Bare []Change `json:"-"`
}

// Side is one of the two runs.
type Side struct {
	Path         string           `json:"path"`
	Device       int              `json:"device"`
	Owner        *recording.Owner `json:"process,omitempty"` // of a driver trace with several processes on the device
	Events       int              `json:"events"`
	DurationUS   int64            `json:"duration_us"`
	PeakLive     uint64           `json:"peak_live_bytes"`
	PeakReserved uint64           `json:"peak_reserved_bytes"` // 0: the file does not say
	Allocs       int              `json:"allocs"`
	Requested    uint64           `json:"requested_bytes"` // in all
	// DriverCalls are segments got and given back, mapped and unmapped; of a driver trace the process's calls for the device.
	DriverCalls int    `json:"driver_calls"`
	DriverNS    uint64 `json:"driver_ns"` // that they took; 0: the file does not say
	OOMs        int    `json:"ooms"`

	Event    int    `json:"event"` // the moment: state after this event, -1 before the first
	TimeUS   int64  `json:"time_us"`
	Live     uint64 `json:"live_bytes"`
	Blocks   int    `json:"blocks"`
	Reserved uint64 `json:"reserved_bytes"`
	Stacks   bool   `json:"stacks"` // the file has some
}

// Change is what one stack, size, pool or stream held in both runs.
type Change struct {
	Named            // of a stack by NameStacks
	Grew    int64    `json:"grew_bytes"`
	BytesA  uint64   `json:"bytes_a"`
	BytesB  uint64   `json:"bytes_b"`
	BlocksA int      `json:"blocks_a"`
	BlocksB int      `json:"blocks_b"`
	Frames  []string `json:"frames,omitempty"` // innermost first; a line that both runs have is the second's
	Size    uint64   `json:"size,omitempty"`   // of exact sizes

	frames []recording.Frame
}

// NoStack stands where a file has no stack of an allocation.
const NoStack = "no stack was recorded"

// Diff compares two runs, each at its peak or, where atEnd, after its last event. align.go says which stacks are the
// same.
func Diff(a, b *recording.Trace, atEnd bool) *Difference {
	d := &Difference{At: "peak", Notes: []string{}}
	if atEnd {
		d.At = "end"
	}
	al := align(a, b)
	stacks, sizes, exact, pools, streams, libraries, tags, bare := changes{}, changes{}, changes{}, changes{}, changes{}, changes{}, changes{}, changes{}
	for k, t := range []*recording.Trace{a, b} {
		side, frames := &d.A, al.a
		if k == 1 {
			side, frames = &d.B, al.b
		}
		*side = sideOf(t)
		_, at := t.PeakLive()
		if atEnd {
			at = len(t.Events) - 1
		}
		keys := map[uint32]string{}
		walk(t, []int{at}, func(i int, s *state) {
			side.Event, side.TimeUS, side.Live, side.Blocks, side.Reserved = i, timeOf(t, i), s.liveBytes, len(s.live), s.reserved
			for _, h := range s.sorted() {
				key, ok := keys[h.stack]
				if !ok {
					key = stackKey(t, h.stack, frames)
					keys[h.stack] = key
				}
				c := stacks.of(key)
				if c.frames == nil {
					c.frames = al.frames(t, h.stack, frames)
				}
				c.add(k, h.size)
				limit := slices.IndexFunc(sizeLimits, func(limit uint64) bool { return limit == 0 || h.size <= limit })
				sizes.of(sizeLabel(limit)).add(k, h.size)
				exactly := exact.of(fmt.Sprintf("%s (%d)", units.FormatBytes(h.size), h.size))
				exactly.Size = h.size
				exactly.add(k, h.size)
				libraries.of(BlockLibrary(t, h.library, h.stack)).add(k, h.size)
				tags.of(cmp.Or(t.TagName(h.tag), NoTag)).add(k, h.size)
				if key == "" {
					c := bare.of(fmt.Sprint(h.size))
					c.Size = h.size
					c.add(k, h.size)
				}
				if int(h.pool) < len(t.Pools) {
					id := t.Pools[h.pool]
					pools.of(fmt.Sprintf("%d,%d", id[0], id[1])).add(k, h.size)
				}
				if int(h.stream) < len(t.Streams) {
					streams.of(fmt.Sprintf("%#x", t.Streams[h.stream])).add(k, h.size)
				}
			}
		})
	}
	stacks.name()
	d.Stack, d.Size, d.Exact, d.Pool, d.Stream = stacks.list(), sizes.list(), exact.list(), pools.list(), streams.list()
	d.Library, d.Bare = libraries.list(), bare.list()
	if len(tags) > 1 || len(tags) == 1 && tags[NoTag] == nil {
		d.Tag = tags.list()
	}
	d.note(a, b)
	return d
}

func (d *Difference) note(a, b *recording.Trace) {
	for _, t := range []*recording.Trace{a, b} {
		if !t.FromStart {
			d.Notes = append(d.Notes, t.Path+": its beginning is missing, so its peak may be too")
		}
	}
	if d.A.Stacks != d.B.Stacks {
		without := d.A.Path
		if d.A.Stacks {
			without = d.B.Path
		}
		d.Notes = append(d.Notes, without+" has no stacks: what the other run allocated with one is distinguished by size only")
	}
	if a.Settings.Conf != b.Settings.Conf {
		d.Notes = append(d.Notes, fmt.Sprintf("the settings differ: %q, then %q", a.Settings.Conf, b.Settings.Conf))
	}
}

func sideOf(t *recording.Trace) Side {
	s := Side{Path: t.Path, Device: t.Device, Owner: t.Owner, Events: len(t.Events), DurationUS: t.Duration(),
		PeakReserved: t.RecordedPeakReserved(), OOMs: t.RecordedOOMs(), Stacks: len(t.Stacks) > 1}
	s.PeakLive, _ = t.PeakLive()
	got, gave := t.RecordedSegmentEvents()
	s.DriverCalls = got + gave
	for i := range t.Events {
		if e := &t.Events[i]; e.Kind == event.Alloc {
			s.Allocs++
			s.Requested += e.Size
		}
	}
	return s
}

// Driver puts in what a driver trace says of calls; d is nil for what is none.
func (s *Side) Driver(d *recording.Driver) {
	if d == nil {
		return
	}
	s.DriverCalls, s.DriverNS = 0, 0
	for i := range d.Calls {
		if c := &d.Calls[i]; (int(c.Device) == s.Device || c.Device < 0) && (s.Owner == nil || s.Owner.Number == c.Process) {
			s.DriverCalls++
			s.DriverNS += c.TookNS
		}
	}
}

// stackKey is the same for stacks that match. It is empty for the empty stack.
func stackKey(t *recording.Trace, stack uint32, lines []uint32) string {
	if int(stack) >= len(t.Stacks) {
		return ""
	}
	var key []byte
	for _, f := range t.Stacks[stack] {
		if int(f) < len(lines) {
			key = binary.LittleEndian.AppendUint32(key, lines[f])
		}
	}
	return string(key)
}

// changes are the entries of one list, by what they are distinguished by.
type changes map[string]*Change

func (c changes) of(key string) *Change {
	x := c[key]
	if x == nil {
		x = &Change{}
		c[key] = x
	}
	return x
}

func (x *Change) add(run int, size uint64) {
	if run == 0 {
		x.BytesA += size
		x.BlocksA++
	} else {
		x.BytesB += size
		x.BlocksB++
	}
}

// name names stacks.
func (c changes) name() {
	keys := slices.Sorted(maps.Keys(c))
	all := make([][]recording.Frame, len(keys))
	for i, key := range keys {
		all[i] = c[key].frames
	}
	for i, n := range NameStacks(all) {
		x := c[keys[i]]
		x.Frames = frameTexts(x.frames)
		x.Named = n.words(x.frames)
	}
}

// list is the largest change first, in either direction, and the same change by name. What has no name is called by its key.
func (c changes) list() []Change {
	out := make([]Change, 0, len(c))
	for key, x := range c {
		x.Grew = int64(x.BytesB - x.BytesA)
		if x.Name == "" {
			x.Name = key
		}
		out = append(out, *x)
	}
	slices.SortFunc(out, func(x, y Change) int {
		return cmp.Or(cmp.Compare(max(y.Grew, -y.Grew), max(x.Grew, -x.Grew)), cmp.Compare(x.Name, y.Name), cmp.Compare(x.From, y.From),
			cmp.Compare(y.BytesB, x.BytesB), slices.Compare(x.Frames, y.Frames))
	})
	return out
}
