//go:build amd64 || arm64

package lockrank

// goroutine is a number that no other goroutine has while this one runs: the address of its descriptor in Go's runtime.
func goroutine() uintptr
