// Package leaves is a sorted sequence into which elements are put one by one: a list of short slices, so that a million
// insertions stay cheap, in whatever order they come. It has no locks and knows no order of its own: its user finds the place.
package leaves

import (
	"iter"
	"sort"
)

// List is a sequence. The zero value is empty.
type List[T any] struct {
	leaves [][]T // none empty
	n      int
}

// Pos is a place in a list. Any change makes it invalid, but that of an element in its place.
type Pos struct{ leaf, i int }

const most = 256 // elements of a leaf

// Len is the number of elements.
func (l *List[T]) Len() int { return l.n }

// Search is the first place at which from holds, which holds at all places behind it as well; the end where it holds nowhere.
func (l *List[T]) Search(from func(*T) bool) Pos {
	k := sort.Search(len(l.leaves), func(k int) bool {
		leaf := l.leaves[k]
		return from(&leaf[len(leaf)-1])
	})
	if k == len(l.leaves) {
		return Pos{k, 0}
	}
	leaf := l.leaves[k]
	return Pos{k, sort.Search(len(leaf), func(i int) bool { return from(&leaf[i]) })}
}

// At is the element at a place, nil at the end.
func (l *List[T]) At(p Pos) *T {
	if p.leaf >= len(l.leaves) {
		return nil
	}
	return &l.leaves[p.leaf][p.i]
}

// Before is the place before p; ok is false at the beginning.
func (l *List[T]) Before(p Pos) (before Pos, ok bool) {
	if p.i > 0 {
		return Pos{p.leaf, p.i - 1}, true
	}
	if p.leaf > 0 {
		return Pos{p.leaf - 1, len(l.leaves[p.leaf-1]) - 1}, true
	}
	return p, false
}

// Insert puts an element in front of the one at p.
func (l *List[T]) Insert(p Pos, x T) {
	l.n++
	if p.leaf == len(l.leaves) {
		if p.leaf == 0 {
			l.leaves = append(l.leaves, []T{x})
			return
		}
		p.leaf--
		p.i = len(l.leaves[p.leaf])
	}
	var zero T
	leaf := append(l.leaves[p.leaf], zero)
	copy(leaf[p.i+1:], leaf[p.i:])
	leaf[p.i] = x
	l.leaves[p.leaf] = leaf
	if len(leaf) < most {
		return
	}
	l.leaves = append(l.leaves, nil)
	copy(l.leaves[p.leaf+2:], l.leaves[p.leaf+1:])
	l.leaves[p.leaf], l.leaves[p.leaf+1] = leaf[:most/2:most/2], append([]T(nil), leaf[most/2:]...)
}

// Delete takes out the element at p. The one behind it then has that place, or the first of the next leaf.
func (l *List[T]) Delete(p Pos) Pos {
	l.n--
	leaf := l.leaves[p.leaf]
	copy(leaf[p.i:], leaf[p.i+1:])
	var zero T
	leaf[len(leaf)-1] = zero
	leaf = leaf[:len(leaf)-1]
	l.leaves[p.leaf] = leaf
	switch {
	case len(leaf) == 0:
		l.leaves = append(l.leaves[:p.leaf], l.leaves[p.leaf+1:]...)
		return Pos{p.leaf, 0}
	case p.i == len(leaf):
		return Pos{p.leaf + 1, 0}
	}
	return p
}

// All are the elements in order.
func (l *List[T]) All() iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for _, leaf := range l.leaves {
			for i := range leaf {
				if !yield(&leaf[i]) {
					return
				}
			}
		}
	}
}
