package cistern

// The policy of sizes: what is cut from which chunks.

const (
	classSmall = iota
	classLarge
	numClasses
)

const smallMax = 1 << 20

// classOf is the size class of a rounded request.
func (d *Device) classOf(n uint64) int {
	if n <= smallMax {
		return classSmall
	}
	return classLarge
}

// groupOf is the statistics group of a class: PyTorch's small pool is what is cut for requests of up to 1 MiB.
func groupOf(class int) int {
	if class == classSmall {
		return groupSmall
	}
	return groupLarge
}

// chunkSize is the size of the next chunk when missing bytes are to be had.
func (d *Device) chunkSize(class int, missing uint64) uint64 {
	g := d.upstream.Granularity()
	if class == classSmall {
		return g
	}
	return min(missing, d.opts.ChunkMax)
}

// overshoot is by how much the last chunk that is moved may exceed what is missing.
func (d *Device) overshoot(class int, need uint64, pressure bool) uint64 {
	if pressure {
		return 1 << 62
	}
	if class == classSmall {
		return d.upstream.Granularity()
	}
	return 1 << 62
}
