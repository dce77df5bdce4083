package cistern

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/internal/units"
)

// PoolUse is what one pool holds.
type PoolUse struct {
	Pool      PoolID
	Upstream  string // what its memory is; "" where it is what the device's options say
	Allocated uint64 // rounded bytes handed out
	Pending   uint64 // bytes given back, still used by other streams
	Free      uint64 // bytes cached
	Spilled   uint64 // of Allocated: from the pool's spill
	Paused    uint64 // of Allocated and Pending: without physical memory
	Pinned    bool   // captured graphs use it: what is free stays
}

// PoolUsage says what each pool of the device holds, the most bytes first. Spare chunks belong to none.
func (d *Device) PoolUsage() []PoolUse {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.poolUsage(nil)
}

// poolUsage is PoolUsage. The caller holds Device.mu and held's lock.
func (d *Device) poolUsage(held *space) []PoolUse {
	var out []PoolUse
	at := map[*Pool]int{}
	for _, s := range d.spaces {
		if s == nil {
			continue
		}
		p := s.pool.owner()
		i, ok := at[p]
		if !ok {
			i = len(out)
			at[p] = i
			out = append(out, PoolUse{Pool: p.id, Upstream: p.upstreamName(), Pinned: p.pinned})
		}
		s.lockBeside(held)
		if s.pool != p {
			out[i].Spilled += uint64(s.gauges.now[gAllocated])
		}
		out[i].Allocated += uint64(s.gauges.now[gAllocated])
		out[i].Pending += uint64(s.gauges.now[gActiveBytes] - s.gauges.now[gAllocated])
		out[i].Free += s.heap.FreeBytes
		out[i].Paused += uint64(s.pausedBytes)
		s.unlockBeside(held)
	}
	slices.SortStableFunc(out, func(a, b PoolUse) int { return cmp.Compare(b.held(), a.held()) })
	return out
}

func (p PoolUse) held() uint64 { return p.Allocated + p.Pending + p.Free }

// mostFindings bounds the pools, tags, libraries and stacks that Findings names; the rest are added up.
const mostFindings = 4

// Names are functions that name what the engine knows by number, of which "" says that there is no name. Each may be nil.
type Names struct {
	Tag     func(tag uint32) string
	Library func(library uint8) string
	// Stack names a stack in few words: its innermost frame that means something to the reader.
	Stack func(stack uint32) string
}

func (n Names) tag(tag uint32) string {
	if tag == 0 {
		return "no tag"
	}
	return nameOf(tag, n.Tag, "tag")
}

func (n Names) stack(stack uint32) string {
	if stack == 0 {
		return "unknown"
	}
	return nameOf(stack, n.Stack, "stack")
}

func (n Names) library(library uint8) string { // 0 may have a name
	s := nameOf(library, n.Library, "library")
	if s == "library 0" {
		return "others"
	}
	return s
}

// nameOf is a number's name, or words for it.
func nameOf[T uint8 | uint32](number T, name func(T) string, kind string) string {
	if name != nil {
		if s := name(number); s != "" {
			return s
		}
	}
	return fmt.Sprintf("%s %d", kind, number)
}

// byName lists who holds the most of something, on one line.
func byName[U any](b *strings.Builder, by string, list []U, use func(U) (name string, blocks int64, bytes uint64)) {
	if len(list) == 0 {
		return
	}
	var items []string
	var rest uint64
	for i, u := range list {
		name, blocks, bytes := use(u)
		if i < mostFindings {
			s := "s"
			if blocks == 1 {
				s = ""
			}
			items = append(items, fmt.Sprintf("%s %s in %d block%s", name, units.FormatBytes(bytes), blocks, s))
		} else {
			rest += bytes
		}
	}
	if n := len(list) - len(items); n > 0 {
		items = append(items, fmt.Sprintf("%d more with %s", n, units.FormatBytes(rest)))
	}
	fmt.Fprintf(b, "; by %s: %s", by, strings.Join(items, "; "))
}

// Findings says in at most three lines, each without its line break, what was found when the request failed: who held
// the memory, what there was left, and what would have met the request. It names only what was counted.
func (e *OutOfMemoryError) Findings(names Names) []string {
	lines := []string{e.holders(names), e.left()}
	if s := e.help(); s != "" {
		lines = append(lines, "would help: "+s)
	}
	return lines
}

func (e *OutOfMemoryError) holders(names Names) string {
	var b strings.Builder
	fmt.Fprintf(&b, "in use: %s", units.FormatBytes(e.Allocated))
	pools := e.Pools
	if len(pools) > 1 || len(pools) == 1 && pools[0].Pool != (PoolID{}) {
		var items []string
		for _, p := range pools[:min(len(pools), mostFindings)] {
			item := fmt.Sprintf("{%d, %d} %s", p.Pool[0], p.Pool[1], units.FormatBytes(p.Allocated))
			if p.Upstream != "" {
				item = fmt.Sprintf("{%d, %d} (%s) %s", p.Pool[0], p.Pool[1], p.Upstream, units.FormatBytes(p.Allocated))
			}
			if p.Paused != 0 {
				item += fmt.Sprintf(" (%s of it paused)", units.FormatBytes(p.Paused))
			}
			if p.Free != 0 {
				item += fmt.Sprintf(" and %s cached", units.FormatBytes(p.Free))
			}
			if p.Spilled != 0 {
				item += fmt.Sprintf(", %s of it spilled", units.FormatBytes(p.Spilled))
			}
			if p.Pinned {
				item += ", pinned by graphs"
			}
			items = append(items, item)
		}
		if rest := len(pools) - len(items); rest > 0 {
			var n uint64
			for _, p := range pools[len(items):] {
				n += p.Allocated
			}
			items = append(items, fmt.Sprintf("%d more with %s", rest, units.FormatBytes(n)))
		}
		fmt.Fprintf(&b, "; by pool: %s", strings.Join(items, "; "))
	}
	byName(&b, "tag", e.Tags, func(u TagUse) (string, int64, uint64) { return names.tag(u.Tag), u.Blocks, u.Allocated })
	byName(&b, "library", e.Libraries, func(u LibraryUse) (string, int64, uint64) {
		return names.library(u.Library), u.Blocks, u.Allocated
	})
	byName(&b, "stack", e.Stacks, func(u StackUse) (string, int64, uint64) { return names.stack(u.Stack), u.Blocks, u.Allocated })
	return b.String()
}

func (e *OutOfMemoryError) left() string {
	var b strings.Builder
	fmt.Fprintf(&b, "free: %s of the %s held, the largest block for this stream and pool %s", units.FormatBytes(e.Cached),
		units.FormatBytes(e.Reserved), units.FormatBytes(e.Largest))
	if e.Limit != 0 {
		fmt.Fprintf(&b, "; the limit is %s", units.FormatBytes(e.Limit))
	}
	if e.PoolLimit != 0 {
		fmt.Fprintf(&b, "; the pool's limit is %s, and it holds %s", units.FormatBytes(e.PoolLimit), units.FormatBytes(e.PoolHolds))
	}
	if e.DriverTotal != 0 {
		fmt.Fprintf(&b, "; on the device %s of %s", units.FormatBytes(e.DriverHas), units.FormatBytes(e.DriverTotal))
		if held := e.DriverHas + e.Reserved - e.Elsewhere; held < e.DriverTotal {
			fmt.Fprintf(&b, ", where contexts and other allocators and processes have %s", units.FormatBytes(e.DriverTotal-held))
		}
	}
	fmt.Fprintf(&b, "; tried: %s", e.Tried)
	return b.String()
}

// help is what the figures show to be in the way, or how much is missing.
func (e *OutOfMemoryError) help() string {
	var items []string
	if e.Off != 0 {
		items = append(items, fmt.Sprintf("the rungs that the settings leave out (%s)", e.Off))
	}
	const unit = 2 << 20 // memory comes in multiples of it
	need := (e.Need + unit - 1) &^ (unit - 1)
	if e.PoolLimit != 0 {
		items = append(items, fmt.Sprintf("a limit of %s for the pool", units.FormatBytes(e.PoolHolds+need)))
		if e.Need <= e.PoolLimit {
			items = append(items, fmt.Sprintf("at least %s less in use there", units.FormatBytes(need-min(need, e.PoolLimit-min(e.PoolLimit, e.PoolHolds)))))
		}
		return strings.Join(items, ", or ")
	}
	if e.DriverTotal == 0 || e.host {
		return strings.Join(items, ", or ") // what else there is, is not known
	}
	usable := e.Cached - min(e.Cached, e.Pinned+e.Other)
	room := e.DriverHas
	if e.Limit != 0 {
		held := e.Reserved - e.Elsewhere
		room = min(room, e.Limit-min(e.Limit, held))
		if e.DriverHas >= need {
			items = append(items, fmt.Sprintf("a limit of %s", units.FormatBytes(held+need)))
		}
	}
	have := usable + room
	if e.Pending != 0 && have < need && have+e.Pending >= need {
		items = append(items, fmt.Sprintf("the end of the work that still uses %s", units.FormatBytes(e.Pending)))
	}
	if e.Pinned != 0 && have < need && have+e.Pinned >= need {
		items = append(items, fmt.Sprintf("the release of captured pools, which pin %s that is free", units.FormatBytes(e.Pinned)))
	}
	switch {
	case have < need && need-have > e.Allocated:
		items = append(items, fmt.Sprintf("asking for less: with nothing in use there would be %s", units.FormatBytes(have+e.Allocated)))
	case have < need:
		items = append(items, fmt.Sprintf("at least %s less in use", units.FormatBytes(need-have)))
	case room < need:
		items = append(items, fmt.Sprintf("whole chunks: %s would do, but it lies in pieces between blocks in use", units.FormatBytes(have)))
	}
	return strings.Join(items, ", or ")
}
