package event

// The hash of a sequence of requests, by which processes that make the same ones are found: FNV-1a over their sizes.
const (
	// HashStart is the hash of no sizes.
	HashStart = 14695981039346656037
	hashPrime = 1099511628211
)

// Mix takes the next size into the hash of a sequence, which is never 0: that stands for an unknown one.
func Mix(hash, size uint64) uint64 {
	for range 8 {
		hash = (hash ^ size&0xff) * hashPrime
		size >>= 8
	}
	return max(1, hash)
}
