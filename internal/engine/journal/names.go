package journal

// Names are numbers by which events name streams, or pools. The number of one that is gone is given to another only when no
// event that can still be read has it.
type Names struct {
	journal *Journal // its lock guards what follows
	numbers Numbers
	last    []uint64 // by number: the last event that has it, as the journal counts them; 0 none
	gone    []int    // from head: numbers of what is gone that events have, in the order in which it went
	head    int
}

// Count is how long a table by number must be.
func (n *Names) Count() int {
	n.journal.mu.Lock()
	defer n.journal.mu.Unlock()
	return n.numbers.count
}

// Gone is how many numbers wait for events to be forgotten, at most.
func (n *Names) Gone() int {
	n.journal.mu.Lock()
	defer n.journal.mu.Unlock()
	return len(n.gone)
}

// Take gives a number.
func (n *Names) Take() int {
	n.journal.mu.Lock()
	defer n.journal.mu.Unlock()
	return n.take(n.journal.oldest())
}

// take gives a number. oldest is the oldest event that can be read.
func (n *Names) take(oldest uint64) int {
	n.forget(oldest)
	i := n.numbers.Take()
	if i == len(n.last) {
		n.last = append(n.last, 0)
	}
	n.last[i] = 0
	return i
}

// Put takes a number back.
func (n *Names) Put(i int) {
	n.journal.mu.Lock()
	defer n.journal.mu.Unlock()
	n.put(i, n.journal.oldest())
}

func (n *Names) put(i int, oldest uint64) {
	n.gone = append(n.gone, i)
	n.forget(oldest)
}

// Forget makes numbers free that no event has any more. Take and Put do, too.
func (n *Names) Forget() {
	n.journal.mu.Lock()
	defer n.journal.mu.Unlock()
	n.forget(n.journal.oldest())
}

// forget makes the numbers free of what went and is in no event from oldest on.
func (n *Names) forget(oldest uint64) {
	for ; n.head < len(n.gone) && n.last[n.gone[n.head]] < oldest; n.head++ {
		n.numbers.Put(n.gone[n.head])
	}
	n.last = n.last[:n.numbers.count]
	if 2*n.head >= len(n.gone) {
		n.gone, n.head = n.gone[:copy(n.gone, n.gone[n.head:])], 0
	}
}

// note says that an event has a number, which may be none.
func (n *Names) note(i uint32, event uint64) {
	if int(i) < len(n.last) {
		n.last[i] = event
	}
}
