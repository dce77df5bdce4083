package cistern

// held is the physical memory of a group: bytes and handles (or segments).
type held struct {
	bytes, handles Value
}

// got notes memory that came from the driver or an upstream, gaveBack memory that went there. counted is memory under
// the device's limit.
//
// +checklocks:d.mu
func (d *Device) got(bytes uint64, counted bool) {
	if counted {
		d.reservedBytes += bytes
	} else {
		d.elsewhere += bytes
	}
	d.held[groupAll].add(bytes)
	d.held[groupAll].raise()
	d.counts.DeviceAllocs++
}

// +checklocks:d.mu
func (d *Device) gaveBack(bytes uint64, counted bool) {
	if counted {
		d.reservedBytes -= bytes
	} else {
		d.elsewhere -= bytes
	}
	d.held[groupAll].take(bytes)
	d.returned += bytes
	d.counts.DeviceFrees++
}

// add notes memory that the driver gave to a group, take memory that went back from it. Memory changes groups as it moves
// between size classes (spare chunks count as large): then it is as if it had come to the other group in the first place
// (leave, join), so that the groups add up to all, also in what was ever added and removed. The peaks of the two groups are
// raised when a request is done (Device.settleLocked), so that no moment within a request counts.
func (h *held) add(bytes uint64) { h.join(bytes) }

func (h *held) take(bytes uint64) {
	h.bytes.Current -= int64(bytes)
	h.bytes.Removed += int64(bytes)
	h.handles.Current--
	h.handles.Removed++
}

func (h *held) join(bytes uint64) {
	h.bytes.Current += int64(bytes)
	h.bytes.Added += int64(bytes)
	h.handles.Current++
	h.handles.Added++
}

func (h *held) leave(bytes uint64) {
	h.bytes.Current -= int64(bytes)
	h.bytes.Added -= int64(bytes)
	h.handles.Current--
	h.handles.Added--
}

func (h *held) raise() {
	h.bytes.Peak = max(h.bytes.Peak, h.bytes.Current)
	h.handles.Peak = max(h.handles.Peak, h.handles.Current)
}
