package top

import (
	"cmp"
	"slices"
)

// Gather adds up the details of a process over its devices, largest first; nil where there are none.
func Gather(all []Holding) *Details {
	var sum *Details
	for i := range all {
		d := all[i].Details
		if d == nil {
			continue
		}
		if sum == nil {
			sum = new(Details)
		}
		sum.Tags = gather(sum.Tags, d.Tags)
		sum.Libraries = gather(sum.Libraries, d.Libraries)
		sum.Pools = gather(sum.Pools, d.Pools)
		sum.Stacks = gather(sum.Stacks, d.Stacks)
		sum.Kinds = gather(sum.Kinds, d.Kinds)
	}
	if sum == nil {
		return nil
	}
	for _, uses := range [][]Use{sum.Tags, sum.Libraries, sum.Pools, sum.Stacks, sum.Kinds} {
		slices.SortStableFunc(uses, func(a, b Use) int { return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name)) })
	}
	return sum
}

func gather(sum, more []Use) []Use {
	at := make(map[string]int, len(sum))
	for i, u := range sum {
		at[u.Name] = i
	}
	for _, u := range more {
		if i, ok := at[u.Name]; ok {
			sum[i].Blocks += u.Blocks
			sum[i].Bytes += u.Bytes
			continue
		}
		at[u.Name] = len(sum)
		sum = append(sum, u)
	}
	return sum
}
