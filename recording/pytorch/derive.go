package pytorch

import (
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/initial"
	"github.com/cistern-gpu/cistern/recording/internal/input"
	"github.com/cistern-gpu/cistern/recording/internal/segments"
)

// traces makes a Trace of each device that has events.
func (m *machine) traces(path string) ([]*recording.Trace, error) {
	settings, whose := m.settingsOf(), m.identity()
	var out []*recording.Trace
	for dev, d := range m.devices {
		if d.N == 0 {
			continue
		}
		t := &recording.Trace{Path: path, Format: recording.FormatPyTorch, Device: dev, Stacks: m.stacks.stacks, Frames: m.stacks.frames,
			Settings: settings, Environment: m.environmentOf(dev), Identity: whose}
		var err error
		if t.Events, err = d.Join(m.b); err != nil {
			return nil, err
		}
		t.Pools = d.poolIDs
		if err := m.final(t, d); err != nil {
			return nil, err
		}
		t.Streams = d.streams.Vals
		t.Tags, t.Libraries, t.Threads = d.names.tags.names, d.names.libraries.names, d.names.threads
		if err := initial.Find(t, initial.Options{InferPools: !d.hasPool, Charge: m.b.Take}); err != nil {
			return nil, err
		}
		m.notes(t, d)
		out = append(out, t)
	}
	if len(out) == 0 {
		return nil, input.Whole("the snapshot has no events; expected one taken while " +
			"torch.cuda.memory._record_memory_history was on")
	}
	return out, nil
}

// final fills t.Final from the file's segments, in address order.
func (m *machine) final(t *recording.Trace, d *rawTrace) error {
	if !m.segmentsMade {
		return nil
	}
	t.Final = []recording.Segment{}
	n := 0
	for i := range m.segments {
		if int(m.segments[i].device) == t.Device {
			n++
		}
	}
	if err := m.b.Take(int64(n) * segments.SegmentSize); err != nil {
		return err
	}
	for i := range m.segments {
		r := &m.segments[i]
		if int(r.device) != t.Device {
			continue
		}
		stream, err := d.streams.Charged(m.b, r.stream)
		if err != nil {
			return err
		}
		s := recording.Segment{Addr: r.addr, Size: r.size, Stream: stream, Large: r.large, Expandable: r.expandable, Stack: r.stack}
		if r.pool != none {
			id, ok := d.pools[r.pool]
			if !ok {
				id = uint32(len(t.Pools))
				t.Pools = append(t.Pools, m.pairs[r.pool])
				d.pools[r.pool] = id
			}
			s.Pool = id
		}
		if err := m.b.Take(int64(r.n) * segments.BlockSize); err != nil {
			return err
		}
		s.Blocks = make([]recording.Block, r.n)
		for j := range s.Blocks {
			b := &m.blocks[r.first+uint32(j)]
			s.Blocks[j] = recording.Block{Addr: b.addr, Size: b.size, Requested: b.requested, Stream: s.Stream, Pool: s.Pool,
				Stack: b.stack, State: b.state}
			if b.label != (said{}) {
				l, err := m.labelOf(d, b.label, true)
				if err != nil {
					return err
				}
				s.Blocks[j].Tag, s.Blocks[j].Library = l.Tag, l.Library
			}
		}
		t.Final = append(t.Final, s)
	}
	slices.SortFunc(t.Final, func(a, b recording.Segment) int {
		switch {
		case a.Addr < b.Addr:
			return -1
		case a.Addr > b.Addr:
			return 1
		}
		return 0
	})
	for i := 1; i < len(t.Final); i++ {
		if a, b := &t.Final[i-1], &t.Final[i]; b.Addr-a.Addr < a.Size {
			return input.Whole("segments at 0x%x and 0x%x of device %d overlap", a.Addr, b.Addr, t.Device)
		}
	}
	return nil
}

func (m *machine) notes(t *recording.Trace, d *rawTrace) {
	if !m.segmentsMade {
		t.Note("the file has no segments: the state at its end is not known")
	}
	if !m.hasSettings {
		t.Note("the file has no allocator_settings: PyTorch's defaults are assumed")
	}
	if d.noTime > 0 {
		t.Note("%d events have no time", d.noTime)
	}
	if d.names.lost > 0 {
		t.Note("there are more tags or libraries than the %d and %d that are distinguished: the file names others %d times",
			math.MaxUint16, math.MaxUint8, d.names.lost)
	}
	for _, id := range slices.Sorted(maps.Keys(m.unknownAction)) {
		t.Note("%d events of unknown action %q were left out", m.unknownAction[id], input.Clip(m.strs.get(id)))
	}
}

// text is a setting's value as Python would print it.
func (m *machine) text(v value) string {
	switch v.k {
	case kStr:
		return text.Clean(string(m.strs.get(v.u)))
	case kInt:
		return strconv.FormatUint(v.u, 10)
	case kNeg:
		return strconv.FormatInt(int64(v.u), 10)
	case kFloat:
		return pyFloat(v.float())
	case kBool:
		if v.u == 1 {
			return "True"
		}
		return "False"
	case kNone:
		return "None"
	case kSubSettings:
		var parts []string
		for _, s := range m.settings {
			if s.parent == uint32(v.u) && s.v.k != kSubSettings && len(parts) < 64 {
				parts = append(parts, text.Clean(string(m.strs.get(uint64(s.key))))+":"+m.text(s.v))
			}
		}
		return strings.Join(parts, ",")
	}
	return v.k.String()
}

// pyFloat is Python's repr of f for the values that settings have.
func pyFloat(f float64) string {
	s := strconv.FormatFloat(f, 'g', -1, 64)
	if !strings.ContainsAny(s, ".eIN") {
		s += ".0"
	}
	return s
}

func (m *machine) settingsOf() recording.Settings {
	if !m.hasSettings {
		return recording.Settings{MaxSplitSize: -1}
	}
	s := recording.Settings{Known: true, MaxSplitSize: -1, Raw: map[string]string{}}
	for _, e := range m.settings {
		if e.parent != none || len(s.Raw) >= 256 {
			continue
		}
		key := text.Clean(string(m.strs.get(uint64(e.key))))
		s.Raw[key] = m.text(e.v)
		switch key {
		case "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF":
			if s.Conf == "" {
				s.Conf = s.Raw[key]
			}
		case "expandable_segments":
			s.Expandable = e.v.k == kBool && e.v.u == 1
		case "max_split_size":
			switch e.v.k {
			case kNeg:
				s.MaxSplitSize = int64(e.v.u)
			case kInt:
				s.MaxSplitSize = -1 // PyTorch's none is 2^64-1
				if e.v.u <= 1<<62 {
					s.MaxSplitSize = int64(e.v.u)
				}
			}
		case "garbage_collection_threshold":
			s.GCThreshold = e.v.float()
		case "roundup_power2_divisions":
			s.RoundupPow2 = m.roundup(e.v)
		}
	}
	return s
}

func (m *machine) roundup(v value) map[uint64]uint64 {
	if v.k != kSubSettings {
		return nil
	}
	out := map[uint64]uint64{}
	for _, e := range m.settings {
		if e.parent != uint32(v.u) || e.v.k != kInt || len(out) >= 64 {
			continue
		}
		if mib, err := strconv.ParseUint(string(m.strs.get(uint64(e.key))), 10, 64); err == nil {
			out[mib] = e.v.u
		}
	}
	return out
}
