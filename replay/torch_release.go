package replay

import "github.com/cistern-gpu/cistern/event"

// collectGarbage is garbage_collect_cached_blocks: above the threshold, whole cached segments of the default large
// pool that were not used for longer than the average are freed, until enough is gone or none is old enough.
func (t *torch) collectGarbage() {
	if t.reserved <= t.gcAt {
		return
	}
	target := t.reserved - t.gcAt
	p := t.use(1)
	age := func(i int32) int64 { return p.searches - t.blocks[i].gcBase }
	var freeable []int32
	var total int64
	t.search(len(t.env.Plan.streams))
	for _, s := range t.env.Plan.streams {
		t.search(p.free[s].len())
		for _, i := range p.free[s].blocks() {
			if t.whole(i) {
				freeable = append(freeable, i)
				total += age(i)
			}
		}
	}
	var reclaimed uint64
	for freed := true; freed && reclaimed < target && len(freeable) > 0; {
		t.search(len(freeable))
		threshold := float64(total) / float64(len(freeable))
		freed = false
		rest := freeable[:0:0]
		for _, i := range freeable {
			if float64(age(i)) < threshold {
				rest = append(rest, i)
				continue
			}
			freed = true
			reclaimed += t.blocks[i].size
			total -= age(i)
			t.freeSegment(i)
		}
		freeable = rest
	}
}

// whole reports whether a cached block is a native segment of which nothing is split off.
func (t *torch) whole(i int32) bool {
	b := &t.blocks[i]
	return b.rng < 0 && b.prev < 0 && b.next < 0
}

// freeSegment is release_block: a whole cached segment goes back to the driver.
func (t *torch) freeSegment(i int32) {
	b := &t.blocks[i]
	t.emit(event.SegmentFree, b.addr, b.size, i)
	t.memFree(b.size)
	t.uncache(i)
	t.dropBlock(i)
}

// releaseOversize is release_available_cached_blocks: with a max_split_size, the smallest cached segment of the stream
// that is not to be split and holds the request is freed, or several smaller ones, the largest first. It reports
// whether enough was freed.
func (t *torch) releaseOversize(r request) bool {
	if t.conf.MaxSplit == noMaxSplit {
		return false
	}
	s := &t.pools[r.pool].free[r.stream]
	want := max(r.size, t.conf.MaxSplit)
	at := s.seek(want, 0, 0)
	if !s.end(at) {
		i := s.at(at).block
		if !t.whole(i) {
			return false
		}
		t.freeSegment(i)
		return true
	}
	var released uint64
	for s.len() > 0 && released < want {
		last := s.at(s.prev(freePos{len(s.leaves), 0}))
		if last.size < t.conf.MaxSplit || !t.whole(last.block) {
			break
		}
		released += last.size
		t.freeSegment(last.block)
	}
	return released >= want
}

// releaseCached is release_cached_blocks: everything that the default pools, and pools that have ended, cache goes
// back to the driver, after waiting for the blocks that other streams still use. That wait frees them in PyTorch; here
// they are freed where the record says so.
func (t *torch) releaseCached() {
	t.search(t.pending + len(t.late) + len(t.ended))
	for range t.pending + len(t.late) {
		t.eventSync()
	}
	t.flushLate()
	t.releasePools(1)
	t.releasePools(0)
	for pool, ended := range t.ended {
		if ended {
			t.releasePools(int32(2 * pool))
			t.releasePools(int32(2*pool + 1))
		}
	}
}

// releasePools gives back what a pool caches: whole native segments and whole pages, stream by stream.
func (t *torch) releasePools(pool int32) {
	if t.pools[pool].free == nil {
		return
	}
	var unmap []int32
	t.search(len(t.env.Plan.streams))
	for _, s := range t.env.Plan.streams {
		t.search(t.pools[pool].free[s].len())
		for _, i := range t.pools[pool].free[s].blocks() {
			if t.blocks[i].rng >= 0 {
				unmap = append(unmap, i)
			} else if t.whole(i) {
				t.freeSegment(i)
			}
		}
	}
	for _, i := range unmap {
		t.unmapBlock(i)
		if b := &t.blocks[i]; b.prev < 0 && b.next < 0 {
			t.dropRange(i)
		}
	}
}

// EmptyCache is torch.cuda.empty_cache.
func (t *torch) EmptyCache() error {
	t.flushLate()
	t.releaseCached()
	return nil
}

// ReleasePool ends a private pool: what it caches goes back, the small blocks first, and what is freed into it later
// goes when the cache is emptied.
func (t *torch) ReleasePool(pool uint32) error {
	t.flushLate()
	t.ended[pool] = true
	t.releasePools(int32(2 * pool))
	t.releasePools(int32(2*pool + 1))
	return nil
}
