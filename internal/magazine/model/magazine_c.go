package model

// cmd/libcistern/magazine.c, function by function.

const (
	busy     = 1
	nextTurn = 1 << 32
	setSize  = 2
)

func (m *protocol) magazineHold(t *thread) { t.add(shut, nextTurn+1, m.o[turnRaise]) }

func (m *protocol) magazineRelease(t *thread) { t.add(shut, ^uint64(0), m.o[turnLower]) }

func (m *protocol) magazineTurn(t *thread) uint64 { return t.load(shut, m.o[turnLook]) }

func isOpen(turn uint64) bool { return uint32(turn) == 0 }

// Magazines by stream. There is one of each.

func (m *protocol) magazineAdd(t *thread, magazine uint64) {
	t.touch(cellMagazine, func(d *data) uint64 { d.value = magazine; return 0 })
}

func (m *protocol) streamAdd(t *thread, handle, index uint64) {
	if t.exchange(namesWord, 1, m.o[namesLock]) != 0 {
		return
	}
	if t.load(nameIndex, m.o[nameLook]) == 0 {
		t.touch(cellHandle, func(d *data) uint64 { d.value = handle; return 0 })
		t.store(nameIndex, index, m.o[nameKeep])
	}
	t.store(namesWord, 0, m.o[namesUnlock])
}

// streamFind is the handle of the stream and the magazine that it leads to, together; 0 for none.
func (m *protocol) streamFind(t *thread) uint64 {
	if t.load(nameIndex, m.o[nameLook]) == 0 {
		return 0
	}
	value := func(d *data) uint64 { return d.value }
	return t.touch(cellHandle, value)<<8 | t.touch(cellMagazine, value)
}

// Blocks that may be put into a magazine. The info is the size alone.

func (m *protocol) blockAdd(t *thread, addr, size, turn uint64) {
	if !isOpen(turn) {
		return
	}
	for i := location(0); i < setSize; i++ {
		if t.load(keys+i, m.o[keyLook]) != 0 || !t.compareExchange(keys+i, 0, busy, m.o[keyClaim], m.o[failed]) {
			continue
		}
		if m.old.publishFirst {
			t.store(infos+i, size, m.o[infoKeep])
			t.store(keys+i, addr, m.o[keyGive])
			if m.magazineTurn(t) != turn {
				m.blockTake(t, addr)
			}
			return
		}
		key := addr
		if m.magazineTurn(t) != turn {
			key = 0
		}
		t.store(infos+i, size, m.o[infoKeep])
		t.store(keys+i, key, m.o[keyGive])
		return
	}
}

// blockTake returns 0 where the block is not there.
func (m *protocol) blockTake(t *thread, addr uint64) uint64 {
	for i := location(0); i < setSize; i++ {
		if t.load(keys+i, m.o[keyLook]) == addr && t.compareExchange(keys+i, addr, busy, m.o[keyTake], m.o[failed]) {
			info := t.load(infos+i, m.o[infoLook])
			t.store(keys+i, 0, m.o[keyGive])
			return info
		}
	}
	return 0
}

// The magazine, of one slot.

// lock tries once: a try behind others that have failed is one that begins later.
func (m *protocol) lock(t *thread) bool {
	return t.load(word, m.o[wordLook]) == 0 && t.exchange(word, 1, m.o[wordLock]) == 0
}

func (m *protocol) unlock(t *thread) { t.store(word, 0, m.o[wordUnlock]) }

func (m *protocol) has(t *thread, size uint64) bool {
	if t.load(count, m.o[slotLook]) == 0 {
		return false
	}
	if m.old.plainEntries {
		return t.touch(cellRequested, func(d *data) uint64 { return d.value }) == size
	}
	return t.load(requested, m.o[slotLook]) == size
}

func (m *protocol) setCount(t *thread, n uint64) { t.store(count, n, m.o[slotKeep]) }

func (m *protocol) setEntry(t *thread, addr, size, stamp uint64) {
	t.touch(cellLocked, func(d *data) uint64 {
		d.slot, d.slotRequested, d.stamp = addr, size, stamp
		return 0
	})
	if m.old.plainEntries {
		t.touch(cellRequested, func(d *data) uint64 { d.value = size; return 0 })
		return
	}
	t.store(requested, size, m.o[slotKeep])
}

func (m *protocol) quick(t *thread) bool { return t.load(quickFlag, m.o[goLook]) != 0 }

// magazineTake returns 0 where Go must.
func (m *protocol) magazineTake(t *thread, size uint64) uint64 {
	turn := m.magazineTurn(t)
	if !isOpen(turn) || !m.has(t, size) || !m.lock(t) {
		return 0
	}
	if !m.quick(t) {
		m.unlock(t)
		return 0
	}
	addr := t.touch(cellLocked, func(d *data) uint64 {
		if d.slot == 0 || d.slotRequested != size {
			return 0
		}
		addr := d.slot
		d.slot, d.out = 0, true
		return addr
	})
	if addr == 0 {
		m.unlock(t)
		return 0
	}
	m.setCount(t, 0)
	m.unlock(t)
	m.blockAdd(t, addr, size, turn)
	return addr
}

func (m *protocol) put(t *thread, addr, info, turn uint64) bool {
	if m.old.quickBeforeLock && !m.quick(t) {
		return false
	}
	if !isOpen(turn) && !m.old.lowerHalf || !m.lock(t) {
		return false
	}
	now := m.magazineTurn(t)
	if m.old.lowerHalf && isOpen(now) {
		now = turn
	}
	if now != turn || !m.old.quickBeforeLock && !m.quick(t) {
		m.unlock(t)
		return false
	}
	stamp := t.load(epochOfC, m.o[goLook])
	const full, another = 1, 2
	switch t.touch(cellLocked, func(d *data) uint64 {
		switch {
		case d.slot != 0:
			return full
		case d.requested != info:
			return another
		}
		d.out = false
		return 0
	}) {
	case full:
		m.unlock(t)
		return false
	case another:
		t.broken("a block is put into the magazine with another's size")
	}
	if t.note(func(g *ghost) uint64 { return uint64(flag(g.history)) }) != 0 {
		t.broken("a free behind SetHistory is not recorded")
	}
	m.setEntry(t, addr, info, stamp)
	m.setCount(t, 1)
	m.unlock(t)
	return true
}

func (m *protocol) magazinePut(t *thread, addr uint64) bool {
	turn := m.magazineTurn(t)
	info := m.blockTake(t, addr)
	return info != 0 && m.put(t, addr, info, turn)
}

// stableKey waits for the end of a claim.
func (m *protocol) stableKey(t *thread, i location) uint64 {
	if m.old.publishFirst || m.old.passClaimed {
		return t.load(keys+i, m.o[keyScan])
	}
	return t.await(keys+i, m.o[keyScan], func(key uint64) bool { return key != busy })
}

func (m *protocol) magazineForgetAll(t *thread) {
	for i := location(0); i < setSize; i++ {
		if key := m.stableKey(t, i); key > busy {
			t.compareExchange(keys+i, key, 0, m.o[keyForget], m.o[failed])
		}
	}
}

func (m *protocol) magazineKnow(t *thread, addr, size, turn uint64) { m.blockAdd(t, addr, size, turn) }
