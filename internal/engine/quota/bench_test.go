package quota

import "testing"

// BenchmarkRebalance is a request that takes the device's lock, beside many streams with memory.
func BenchmarkRebalance(b *testing.B) {
	var d Device
	arenas := make([]Arena, 2000)
	for i := range arenas {
		d.AddArena(&arenas[i])
		arenas[i].Classes[i%NumClasses].Alloc(1000, 1024, 1)
	}
	for b.Loop() {
		d.Rebalance(&arenas[7], 3)
	}
}
