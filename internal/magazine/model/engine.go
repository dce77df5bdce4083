package model

// What the engine does, and shim.c around calls of it. Go's atomic operations are seq_cst.

// goLock is Magazine.Lock.
func (m *protocol) goLock(t *thread) { t.acquireWhen(word, 0, 1, seqCst) }

// goUnlock is Magazine.Unlock.
func (m *protocol) goUnlock(t *thread) { t.store(word, 0, seqCst) }

// drain is arena.drain, for holders of the lock.
func (m *protocol) drain(t *thread) {
	const ok, empty, paused, lost, early = 0, 1, 2, 3, 4
	switch t.touch(cellLocked, func(d *data) uint64 {
		was := *d
		if was.slot != 0 {
			d.slot, d.used = 0, false
		}
		switch {
		case was.slot == 0:
			return empty
		case was.paused:
			return paused
		case !was.used || was.out:
			return lost
		case was.stamp <= was.over && !was.covered:
			return early
		}
		return ok
	}) {
	case empty:
		return // Empty stores nothing either
	case paused:
		t.broken("a paused block is in the magazine")
	case lost:
		t.broken("a block is in the magazine that is free, or out")
	case early:
		t.broken("a block is taken for idle that the GPU will use")
	}
	t.store(count, 0, seqCst)
}

// allocMagazine is cistern_malloc where magazineTake has returned 0: the heap meets the request if the block is free.
func (m *protocol) allocMagazine(t *thread, size uint64) uint64 {
	turn := m.magazineTurn(t)
	m.goLock(t)
	m.drain(t)
	got := t.touch(cellLocked, func(d *data) uint64 {
		if d.used {
			return 0
		}
		d.used, d.out, d.requested, d.paused = true, true, size, false
		return block
	})
	m.goUnlock(t)
	if got != 0 {
		m.magazineKnow(t, got, size, turn)
	}
	return got
}

// cisternFree is that of a block that the thread has.
func (m *protocol) cisternFree(t *thread, addr uint64) {
	if m.magazinePut(t, addr) {
		return
	}
	m.goLock(t)
	m.drain(t)
	t.touch(cellLocked, func(d *data) uint64 {
		if d.used && d.out {
			d.used, d.out, d.paused = false, false, false
		}
		return 0
	})
	m.goUnlock(t)
}

// pause is cistern_pause: Device.Pause with all arenas locked, up to endTokens.
func (m *protocol) pause(t *thread) {
	m.magazineHold(t)
	m.goLock(t)
	m.drain(t)
	t.touch(cellLocked, func(d *data) uint64 { d.paused = d.used; return 0 })
	m.magazineForgetAll(t)
	m.goUnlock(t)
	m.magazineRelease(t)
}

// restore is cistern_pool_restore of the default pool, to a state without blocks.
func (m *protocol) restore(t *thread) {
	if !m.old.restoreWithoutHold {
		m.magazineHold(t)
	}
	m.goLock(t)
	m.drain(t)
	t.touch(cellLocked, func(d *data) uint64 { d.used, d.out = false, false; return 0 })
	m.goUnlock(t)
	m.magazineForgetAll(t)
	if !m.old.restoreWithoutHold {
		m.magazineRelease(t)
	}
}

// mutex is a mutex of Go's, or the driver's for one stream.
func mutex(t *thread, l location, f func()) {
	t.acquireWhen(l, 0, 1, acquire)
	f()
	t.store(l, 0, release)
}

// launch is cuLaunchKernel, of a kernel that uses the block.
func (m *protocol) launch(t *thread) {
	mutex(t, driver, func() { t.touch(cellDriver, func(d *data) uint64 { d.value = 1; return 0 }) })
}

// open is Stream.open.
func (m *protocol) open(t *thread, epoch uint64) {
	t.store(epochOfGo, epoch, seqCst)
	if !m.old.epochUnseen {
		t.store(epochOfC, epoch, seqCst)
	}
}

// sync closes the open epoch as Stream.record and Stream.syncEvent do, and waits until it is over, with all that the driver
// was given before.
func (m *protocol) sync(t *thread) {
	epoch := t.load(epochOfGo, seqCst)
	if !m.old.eventFirst {
		m.open(t, epoch+1)
	}
	covered := uint64(0)
	mutex(t, driver, func() { covered = t.touch(cellDriver, func(d *data) uint64 { return d.value }) })
	if m.old.eventFirst {
		m.open(t, epoch+1)
	}
	m.goLock(t)
	t.touch(cellLocked, func(d *data) uint64 { d.over, d.covered = epoch, covered != 0; return 0 })
	m.goUnlock(t)
}

// updateQuick is Device.updateQuick.
func (m *protocol) updateQuick(t *thread) {
	update := func() {
		on := uint64(0)
		if t.load(poison, seqCst) == 0 && t.load(history, seqCst) == 0 {
			on = 1
		}
		t.store(quickFlag, on, seqCst)
	}
	if m.old.quickUnlocked {
		update()
		return
	}
	mutex(t, quickMu, update)
}

// setHistory is Device.SetHistory.
func (m *protocol) setHistory(t *thread, on bool) {
	t.store(history, uint64(flag(on)), seqCst)
	m.updateQuick(t)
	if !m.old.historyAtOnce {
		m.goLock(t)
		m.goUnlock(t)
	}
	t.note(func(g *ghost) uint64 { g.history = on; return 0 })
}

// fails is Device.failed, with an error that breaks the context.
func (m *protocol) fails(t *thread) {
	t.store(poison, 1, seqCst)
	m.updateQuick(t)
}
