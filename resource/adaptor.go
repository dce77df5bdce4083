package resource

// adaptor is what the adaptors that change nothing about the memory have in common.
type adaptor struct{ up Resource }

// Upstream is what the adaptor gets memory from.
func (a *adaptor) Upstream() Resource { return a.up }

// MemInfo is the upstream's.
func (a *adaptor) MemInfo() (free, total uint64, err error) { return a.up.MemInfo() }

// Traits are the upstream's.
func (a *adaptor) Traits() Traits { return a.up.Traits() }

// sameResource is Equal of adaptors, which keep books: memory is given back to the adaptor that it came from.
func sameResource(a, b Resource) bool { return a == b }
