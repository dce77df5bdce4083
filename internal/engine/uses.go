package engine

import (
	"github.com/cistern-gpu/cistern/internal/engine/timeline"
	"github.com/cistern-gpu/cistern/internal/heap"
)

// use is one entry of a block's list of other streams that use it.
type use struct {
	stream   *Stream
	next     int32
	borrower bool // the stream borrowed the block
}

// useLists are the lists of all blocks of a device, linked by index; heap.Uses has the first index of a block's. Guarded by
// Device.mu.
type useLists struct {
	entries []use // the first is never used
	spare   int32 // the first of those that are in no list
}

// add puts a stream on a list unless it is there.
func (l *useLists) add(u heap.Uses, t *Stream) heap.Uses {
	for i := u.List(); i != 0; i = l.entries[i].next {
		if l.entries[i].stream == t {
			return u
		}
	}
	i := l.spare
	if i != 0 {
		l.spare = l.entries[i].next
	} else {
		if len(l.entries) == 0 {
			l.entries = make([]use, 1)
		}
		i = int32(len(l.entries))
		l.entries = append(l.entries, use{})
	}
	l.entries[i] = use{stream: t, next: u.List()}
	return u.WithList(i)
}

// borrowedBy is a list of the one stream that borrowed a block.
func (l *useLists) borrowedBy(t *Stream) heap.Uses {
	u := l.add(0, t)
	l.entries[u.List()].borrower = true
	return u
}

// take empties a list and returns its streams.
func (l *useLists) take(u heap.Uses) []*timeline.Stream {
	var out []*timeline.Stream
	for i := u.List(); i != 0; {
		next := l.entries[i].next
		out = append(out, &l.entries[i].stream.timeline)
		l.recycle(i)
		i = next
	}
	return out
}

// drop removes a stream from a list.
func (l *useLists) drop(u heap.Uses, t *Stream) heap.Uses {
	first := u.List()
	for at := &first; *at != 0; at = &l.entries[*at].next {
		if i := *at; l.entries[i].stream == t {
			*at = l.entries[i].next
			l.recycle(i)
			break
		}
	}
	return u.WithList(first)
}

func (l *useLists) recycle(i int32) {
	l.entries[i] = use{next: l.spare}
	l.spare = i
}

// borrower is the stream that borrowed a block, nil where none did.
func (l *useLists) borrower(u heap.Uses) *Stream {
	for i := u.List(); i != 0; i = l.entries[i].next {
		if l.entries[i].borrower {
			return l.entries[i].stream
		}
	}
	return nil
}
