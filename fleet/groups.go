package fleet

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/event"
)

// Group is ranks that made the same requests.
type Group struct {
	// Same says what is the same: SameSequence, SameTotals, SameCounts or "" for a rank that is alone.
	Same  string
	Ranks []*Rank // by headroom, the least first
}

// How much the requests of a group's ranks are the same, step by step.
const (
	SameSequence = "sequence" // sizes in their order
	SameTotals   = "totals"   // number and bytes
	SameCounts   = "counts"   // number
)

// leader is the first rank of a group, with the digests of its first 1, 2, … rows.
type leader struct {
	group  int
	steps  []int64
	prefix []uint64
}

// grouped puts ranks together whose requests are equal as far as both go. Ranks that ended early join those that went on.
func grouped(ranks []*Rank, every int64, word func(*Row) uint64) [][]*Rank {
	order := slices.Clone(ranks)
	slices.SortStableFunc(order, func(a, b *Rank) int { return cmp.Compare(b.s().Steps, a.s().Steps) })
	var groups [][]*Rank
	var leaders []leader
next:
	for _, r := range order {
		steps, prefix := digests(&r.Device.Series, every, word)
		for _, l := range leaders {
			if n := len(prefix); n > 0 && n <= len(l.prefix) && l.prefix[n-1] == prefix[n-1] && l.steps[n-1] == steps[n-1] {
				groups[l.group] = append(groups[l.group], r)
				continue next
			}
		}
		leaders = append(leaders, leader{len(groups), steps, prefix})
		groups = append(groups, []*Rank{r})
	}
	return groups
}

// digests are those of the whole rows of a series.
func digests(s *Series, every int64, word func(*Row) uint64) (steps []int64, prefix []uint64) {
	h := uint64(event.HashStart)
	for i := range s.Len() {
		row := s.Row(i)
		if row.Step%every != 0 {
			break // it stands for fewer steps
		}
		h = event.Mix(event.Mix(h, uint64(row.Step)), word(&row))
		steps, prefix = append(steps, row.Step), append(prefix, h)
	}
	return steps, prefix
}

// sequences is a digest of the requests of a row, of their order where that is known.
func sequences(r *Row) uint64 {
	return event.Mix(event.Mix(event.Mix(event.HashStart, r.Requests), r.Requested), r.HashSum)
}

func counts(r *Row) uint64 { return r.Requests }

// groupsOf are the groups of a job, the one with most ranks first. Where hardly two ranks are equal, as where batches have
// lengths of their own, ranks with as many requests in each step are a group.
func groupsOf(ranks []*Rank) []*Group {
	every, hashed := int64(1), true
	for _, r := range ranks {
		every = max(every, r.Device.Series.Every)
	}
	for _, r := range ranks {
		r.Device.Series.At(every)
		hashed = hashed && len(r.Device.Series.Hash) == r.Device.Series.Len() && !slices.Contains(r.Device.Series.Hash, 0)
	}
	if !hashed {
		for _, r := range ranks {
			r.Device.Series.Hash = nil
		}
	}
	same := SameTotals
	if hashed {
		same = SameSequence
	}
	lists := grouped(ranks, every, sequences)
	if alike := grouped(ranks, every, counts); len(lists) > len(ranks)/2 && len(alike) <= len(lists)/2 {
		lists, same = alike, SameCounts
	}
	var groups []*Group
	for _, list := range lists {
		slices.SortStableFunc(list, func(a, b *Rank) int {
			return cmp.Or(cmp.Compare(a.Headroom, b.Headroom), cmp.Compare(a.ID.Rank, b.ID.Rank))
		})
		g := &Group{Same: same, Ranks: list}
		if len(list) == 1 {
			g.Same = ""
		}
		groups = append(groups, g)
	}
	slices.SortStableFunc(groups, func(a, b *Group) int {
		return cmp.Or(cmp.Compare(len(b.Ranks), len(a.Ranks)), cmp.Compare(a.Ranks[0].ID.Rank, b.Ranks[0].ID.Rank))
	})
	for i, g := range groups {
		for _, r := range g.Ranks {
			r.group = i
		}
	}
	return groups
}

// twinKey is the coordinates of a rank without that of data parallelism.
func twinKey(r *Rank) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r.ID.Coordinates)) {
		if name != "dp" {
			b.WriteString(name + strconv.Itoa(r.ID.Coordinates[name]) + ",")
		}
	}
	return b.String()
}
