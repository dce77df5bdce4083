package offload

import (
	"bytes"
	"fmt"
	"strconv"
	"syscall"
	"unsafe"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/nopoll"
	"github.com/cistern-gpu/cistern/internal/units"
)

// Host memory that the process maps itself, in large pages where the kernel has them.

const canMap = true

type hostMemory struct {
	mapped []byte // as the kernel gave it
	used   []byte // what is page-locked of it: whole large pages
}

func (m hostMemory) is() bool       { return m.mapped != nil }
func (m hostMemory) bytes() []byte  { return m.used }
func (m hostMemory) base() cuda.Ptr { return cuda.Ptr(uintptr(unsafe.Pointer(&m.used[0]))) }

func mapHost(size uint64) (hostMemory, error) {
	const (
		large    = 2 << 20
		hugepage = 14 // MADV_HUGEPAGE
		dontFork = 10 // MADV_DONTFORK
	)
	b, err := syscall.Mmap(-1, 0, int(size)+large, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return hostMemory{}, fmt.Errorf("mapping %s of host memory: %w", units.FormatBytes(size), err)
	}
	skip := -uintptr(unsafe.Pointer(&b[0])) & (large - 1)
	m := hostMemory{b, b[skip : skip+uintptr(size)]}
	// Both are wishes. A child of fork has no use for it, and would have it copied when the parent writes.
	_ = syscall.Madvise(m.used, hugepage)
	_ = syscall.Madvise(b, dontFork)
	return m, nil
}

func unmapHost(m hostMemory) { _ = syscall.Munmap(m.mapped) }

// enough is an error where the machine is known not to have so much memory left: page-locking more would have the kernel
// end programs.
func enough(need uint64) error {
	text, err := nopoll.ReadFile("/proc/meminfo")
	if err != nil {
		return nil
	}
	_, rest, ok := bytes.Cut(text, []byte("MemAvailable:"))
	f := bytes.Fields(rest)
	if !ok || len(f) == 0 {
		return nil
	}
	kb, err := strconv.ParseUint(string(f[0]), 10, 50)
	if err == nil && kb<<10 < need {
		return fmt.Errorf("%s of page-locked host memory needed, %s of host memory available", units.FormatBytes(need), units.FormatBytes(kb<<10))
	}
	return nil
}
