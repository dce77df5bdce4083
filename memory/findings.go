package memory

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/units"
)

// mostFindings bounds the pools, tags, libraries and stacks that Findings names; the rest are added up. mostNamed bounds the
// stacks that are named at all, as that may take reading the tables of libraries.
const (
	mostFindings = 3
	mostNamed    = 16
)

// Names are functions that name what the engine knows by number, of which "" says that there is no name. Each may be nil.
type Names struct {
	Tag     func(tag uint32) string
	Library func(library uint8) string
	// Stack names a stack in few words: its innermost frame that means something to the reader, and the one that tells uses of
	// that one apart, which is given where it takes that, or where there is nothing else.
	Stack func(stack uint32) (place, from string)
}

func (n Names) tag(tag uint32) string {
	if tag == 0 {
		return "no tag"
	}
	return nameOf(tag, n.Tag, "tag")
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

// holder is a group of allocations.
type holder struct {
	place, from string
	bytes       uint64
}

// mostHolders names the largest holders, in one clause. rest is what others hold beside those in the list.
func mostHolders(list []holder, rest uint64) string {
	for _, h := range list[min(len(list), mostFindings):] {
		rest += h.bytes
	}
	list = list[:min(len(list), mostFindings)]
	var items []string
	for i, h := range list {
		name := h.place
		if h.from != "" && (len(list) == 1 || slices.ContainsFunc(slices.Delete(slices.Clone(list), i, i+1), func(o holder) bool { return o.place == h.place })) {
			name += " < " + h.from
		}
		items = append(items, units.FormatBytes(h.bytes)+" "+name)
	}
	if rest > 0 {
		items = append(items, units.FormatBytes(rest)+" in others")
	}
	return strings.Join(items, ", ")
}

// byStack adds up stacks that are called the same.
func (e *OutOfMemoryError) byStack(names Names) string {
	var list []holder
	var rest uint64
	for i, u := range e.Stacks {
		if i >= mostNamed {
			rest += u.Allocated
			continue
		}
		h := holder{bytes: u.Allocated}
		switch {
		case u.Stack == 0:
			h.place = "without a stack"
		case names.Stack != nil:
			h.place, h.from = names.Stack(u.Stack)
		}
		if h.place == "" {
			h.place = fmt.Sprintf("stack %d", u.Stack)
		}
		if at := slices.IndexFunc(list, func(o holder) bool { return o.place == h.place && o.from == h.from }); at >= 0 {
			list[at].bytes += h.bytes
		} else {
			list = append(list, h)
		}
	}
	slices.SortStableFunc(list, func(a, b holder) int { return cmp.Compare(b.bytes, a.bytes) })
	return mostHolders(list, rest)
}

// byPool says what pools hold and cache, where there is more than the default one.
func (e *OutOfMemoryError) byPool() string {
	if len(e.Pools) == 0 || len(e.Pools) == 1 && e.Pools[0].Pool == (PoolID{}) {
		return ""
	}
	var items []string
	var rest uint64
	for i, p := range e.Pools {
		if i >= mostFindings {
			rest += p.Allocated
			continue
		}
		item := units.FormatBytes(p.Allocated) + " " + p.Pool.words()
		var more []string
		if p.Upstream != "" {
			more = append(more, p.Upstream)
		}
		if p.Paused != 0 {
			more = append(more, units.FormatBytes(p.Paused)+" of it paused")
		}
		if p.Spilled != 0 {
			more = append(more, units.FormatBytes(p.Spilled)+" of it spilled")
		}
		if p.Free != 0 {
			more = append(more, units.FormatBytes(p.Free)+" more cached")
		}
		if p.Pinned {
			more = append(more, "pinned by graphs")
		}
		if len(more) > 0 {
			item += " (" + strings.Join(more, ", ") + ")"
		}
		items = append(items, item)
	}
	if rest > 0 {
		items = append(items, units.FormatBytes(rest)+" in others")
	}
	return strings.Join(items, ", ")
}

// Findings says in at most three lines, each without its line break, what was found when the request failed: the top
// allocations, what other processes were asked for and have, if a broker was asked, and what would have met the request. It names only what was counted, and does not repeat what Error says.
func (e *OutOfMemoryError) Findings(names Names) []string {
	lines := []string{"allocated: " + e.holders(names)}
	for _, s := range e.Steps {
		if s.Stage == StageNode && s.Tries > 0 && s.Note != "" {
			lines = append(lines, fmt.Sprintf("node's broker, %v: %s", s.Took.Round(time.Millisecond), s.Note))
		}
	}
	if s := e.help(); s != "" {
		lines = append(lines, "would help: "+s)
	}
	return lines
}

func (e *OutOfMemoryError) holders(names Names) string {
	var parts []string
	add := func(by, text string) {
		if text != "" {
			parts = append(parts, by+text)
		}
	}
	var tags, libraries []holder
	for _, u := range e.Tags {
		tags = append(tags, holder{place: names.tag(u.Tag), bytes: u.Allocated})
	}
	for _, u := range e.Libraries {
		libraries = append(libraries, holder{place: names.library(u.Library), bytes: u.Allocated})
	}
	add("", e.byStack(names))
	add("by tag ", mostHolders(tags, 0))
	if len(libraries) > 1 { // else it is all the same one's
		add("by library ", mostHolders(libraries, 0))
	}
	add("by pool ", e.byPool())
	if len(e.Stacks) == 0 && len(e.Tags) == 0 {
		text := units.FormatBytes(e.Allocated)
		if e.Allocated != 0 {
			text += ", without stacks and tags: the settings stacks:python and stacks:native record stacks"
		}
		parts = append([]string{text}, parts...)
	}
	return strings.Join(parts, "; ")
}

// present is what is handed out of the device's own memory: not what is paused, nor what lies elsewhere.
func (e *OutOfMemoryError) present() uint64 {
	n := e.Allocated - min(e.Allocated, e.Paused)
	for _, p := range e.Pools {
		if p.Elsewhere {
			n -= min(n, p.Allocated)
		}
	}
	return n
}

// help is what the figures show to be in the way, or how much is missing.
func (e *OutOfMemoryError) help() string {
	var items []string
	if e.Off != 0 {
		items = append(items, fmt.Sprintf("stages:all, as the settings leave out %s", e.Off))
	}
	const unit = 2 << 20 // memory comes in multiples of it
	need := (e.Need + unit - 1) &^ (unit - 1)
	known := e.DriverTotal != 0 && !e.OffDevice // what else there is
	held := e.Reserved - e.Elsewhere
	usable := e.Cached - min(e.Cached, e.Pinned+e.Other)
	available := e.DriverFree
	if e.Limit != 0 {
		available = min(available, e.Limit-min(e.Limit, held))
	}
	if e.PoolLimit != 0 {
		raise := fmt.Sprintf("a limit of %s for %s (now %s)", units.FormatBytes(e.PoolReserved+need), e.Pool.words(), units.FormatBytes(e.PoolLimit))
		if reusable := available + usable/unit*unit; known && reusable < need {
			raise += fmt.Sprintf(", and at least %s less in use elsewhere, as more than the pool's limit is in the way", units.FormatBytes(need-reusable))
		}
		items = append(items, raise)
		if e.Need <= e.PoolLimit {
			items = append(items, fmt.Sprintf("at least %s less in use there", units.FormatBytes(need-min(need, e.PoolLimit-min(e.PoolLimit, e.PoolReserved)))))
		}
		return strings.Join(items, ", or ")
	}
	if !known {
		return strings.Join(items, ", or ")
	}
	if e.Limit != 0 && e.DriverFree >= need && held+need > e.Limit {
		items = append(items, fmt.Sprintf("a limit of %s (now %s)", units.FormatBytes(held+need), units.FormatBytes(e.Limit)))
	}
	have := usable + available
	if e.Pending != 0 && have < need && have+e.Pending >= need {
		items = append(items, fmt.Sprintf("the end of the work that still uses %s", units.FormatBytes(e.Pending)))
	}
	if e.Pinned != 0 && have < need && have+e.Pinned >= need {
		items = append(items, fmt.Sprintf("the release of captured pools, which pin %s that is free", units.FormatBytes(e.Pinned)))
	}
	switch {
	case have < need && need-have > e.present():
		items = append(items, fmt.Sprintf("asking for less: with nothing in use there would be %s", units.FormatBytes(have+e.present())))
	case have < need:
		items = append(items, fmt.Sprintf("at least %s less in use", units.FormatBytes(need-have)))
	case available < need:
		items = append(items, fmt.Sprintf("less in pieces: %s are cached or free on the device, but the largest free block for this is %s",
			units.FormatBytes(have), units.FormatBytes(e.Largest)))
	}
	if others := e.DriverTotal - min(e.DriverTotal, e.DriverFree+held); have < need && e.DriverFree < need && others >= need-have {
		items = append(items, fmt.Sprintf("less for contexts, other allocators and other processes, which have %s of the device", units.FormatBytes(others)))
	}
	return strings.Join(items, ", or ")
}
