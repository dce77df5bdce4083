package quota

// Value is one statistic: now, at its highest, and everything added and taken away.
type Value struct {
	Current, Peak, Added, Removed int64
}

func (v *Value) raise() { v.Peak = max(v.Peak, v.Current) }

// Physical is the physical memory of a group: bytes and handles (or segments).
//
// Memory changes groups as it moves between size classes (spare chunks count as large): then it is as if it had come to the
// other group in the first place (Leave, Join), so that the groups add up to all, also in what was ever added and removed.
// The peaks of the two groups are raised when a request is done (Device.Rebalance), so that no moment within a request
// counts.
type Physical struct {
	Bytes, Handles Value
}

// Add notes memory that the driver gave.
func (p *Physical) Add(bytes uint64) { p.Join(bytes) }

// Remove notes memory that went back.
func (p *Physical) Remove(bytes uint64) {
	p.Bytes.Current -= int64(bytes)
	p.Bytes.Removed += int64(bytes)
	p.Handles.Current--
	p.Handles.Removed++
}

// Join notes memory that came from another group.
func (p *Physical) Join(bytes uint64) {
	p.Bytes.Current += int64(bytes)
	p.Bytes.Added += int64(bytes)
	p.Handles.Current++
	p.Handles.Added++
}

// Leave notes memory that went to another group.
func (p *Physical) Leave(bytes uint64) {
	p.Bytes.Current -= int64(bytes)
	p.Bytes.Added -= int64(bytes)
	p.Handles.Current--
	p.Handles.Added--
}

func (p *Physical) raise() {
	p.Bytes.raise()
	p.Handles.raise()
}
