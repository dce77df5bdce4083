package sim

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
)

// Every measured point is given back as it was measured, to the nanosecond.
func TestCostsAreTheTable(t *testing.T) {
	c := DefaultCosts()
	methods := map[string]func(uint64) time.Duration{
		"cudaMalloc_us": c.MemAlloc, "cudaFree_us": c.MemFree, "cudaMallocAsync_us": c.MallocAsync,
		"cudaFreeAsync_us": c.FreeAsync, "cuMemCreate_us": c.MemCreate, "cuMemMap_us": c.MemMap,
		"cuMemSetAccess_us":      func(n uint64) time.Duration { return c.MemSetAccess(n, 1) },
		"cuMemUnmap_us":          c.MemUnmap,
		"cuMemRelease_us":        c.MemRelease,
		"cuMemAddressReserve_us": c.MemAddressReserve,
		"cuMemAddressFree_us":    c.MemAddressFree,
	}
	lines := strings.Split(strings.TrimSpace(h200CSV), "\n")
	header := strings.Split(lines[0], ",")
	if len(header) != len(methods)+1 || len(lines) < 5 {
		t.Fatalf("table of %d columns and %d lines", len(header), len(lines))
	}
	for _, line := range lines[1:] {
		f := strings.Split(line, ",")
		for i, name := range header[1:] {
			want, err := time.ParseDuration(f[i+1] + "us")
			ok(t, err)
			if got := methods[name](parseSize(t, f[0])); got != want {
				t.Errorf("%s of %s bytes: %v, want %v", name, f[0], got, want)
			}
		}
	}
}

func parseSize(t *testing.T, s string) uint64 {
	t.Helper()
	var n uint64
	for _, r := range s {
		n = n*10 + uint64(r-'0')
	}
	return n
}

// Between two points a cost lies between theirs, and beyond the last it goes on growing.
func TestCostsBetweenPoints(t *testing.T) {
	c := DefaultCosts()
	lo, mid, hi := c.MemAlloc(1<<30), c.MemAlloc(4<<30), c.MemAlloc(8<<30)
	if !(lo < mid && mid < hi) {
		t.Errorf("MemAlloc of 1, 4, 8 GiB: %v %v %v", lo, mid, hi)
	}
	if beyond := c.MemAlloc(80 << 30); beyond < 9*hi {
		t.Errorf("MemAlloc of 80 GiB %v, of 8 GiB %v", beyond, hi)
	}
	if c.MemAlloc(1) != c.MemAlloc(512) {
		t.Error("below the first point a cost is the first's")
	}
}

// One access call over many handles costs per handle what was measured for 1 GiB in handles of one size.
func TestCostOfAccessPerHandle(t *testing.T) {
	for _, m := range []struct {
		size    uint64
		handles int
		us      float64
	}{{2 * mib, 512, 10791}, {16 * mib, 64, 1130}, {64 * mib, 16, 315}, {256 * mib, 4, 121}} {
		got := DefaultCosts().MemSetAccess(m.size, m.handles).Seconds() * 1e6
		if got < m.us*0.999 || got > m.us*1.001 {
			t.Errorf("access to %d handles of %d MiB: %.1f us, measured %.1f", m.handles, m.size/mib, got, m.us)
		}
	}
}

// A request that fails costs what was seen on an H200, which depends on what was free.
func TestCostOfFailure(t *testing.T) {
	near := func(name string, got, want time.Duration) {
		t.Helper()
		if got < want*9/10 || got > want*11/10 {
			t.Errorf("%s: %v, measured %v", name, got, want)
		}
	}
	c := DefaultCosts()
	near("create, full", c.MemCreateFails(0), 43*time.Microsecond)
	near("create, 512 MiB free", c.MemCreateFails(512*mib), 46*time.Microsecond)
	near("create, 139 GiB free", c.MemCreateFails(139*gib), 1830*time.Microsecond)
	near("alloc, full", c.MemAllocFails(0), 86*time.Microsecond)
	near("alloc, 139 GiB free", c.MemAllocFails(139*gib), 3620*time.Microsecond)
	d := New(Options{Capacity: 6 * gib})
	ok(t, d.RetainContext(0))
	_, err := d.MemCreate(8*gib, cuda.MemProp{})
	wantCode(t, err, cuda.ErrOutOfMemory)
	_, err = d.MemAlloc(0, 8*gib)
	wantCode(t, err, cuda.ErrOutOfMemory)
	if got, want := d.Calls().Time-c.Attribute, c.MemCreateFails(6*gib)+c.MemAllocFails(6*gib); got != want {
		t.Errorf("two failures cost %v, want %v", got, want)
	}
}

// Exports and imports cost what was measured, of whatever size, and the release of an import less than that of memory.
func TestCostOfSharing(t *testing.T) {
	if Exportable == cuda.HandleNone {
		t.Skip("descriptors are passed on Linux")
	}
	for _, m := range []struct {
		size     uint64
		imported time.Duration
	}{{2 * mib, 23 * time.Microsecond}, {32 * mib, 32 * time.Microsecond}, {256 * mib, 32 * time.Microsecond}, {gib, 32 * time.Microsecond}} {
		a, b := New(Options{Handles: Exportable}), New(Options{})
		h := must[cuda.Handle](t)(a.MemCreate(m.size, cuda.MemProp{Handles: Exportable}))
		fd := must[int](t)(a.MemExport(h))
		defer os.NewFile(uintptr(fd), "chunk").Close()
		ok(t, b.MemRelease(must[cuda.Handle](t)(b.MemImport(0, fd))))
		ok(t, a.MemRelease(must[cuda.Handle](t)(a.MemImport(0, fd))))
		const export, release = 35 * time.Microsecond, 12 * time.Microsecond
		if got, want := b.Calls().Time, m.imported+release; got != want {
			t.Errorf("import and release of %d MiB: %v, want %v", m.size/mib, got, want)
		}
		if got, want := a.Calls().Time, a.costs.MemCreate(m.size)+export+m.imported+release; got != want {
			t.Errorf("%d MiB by its own driver: %v, want %v", m.size/mib, got, want)
		}
	}
}

func TestCostTableErrors(t *testing.T) {
	head, rest, _ := strings.Cut(h200CSV, "\n")
	for name, bad := range map[string]string{
		"no column cuMemMap_us":              strings.Replace(head, "cuMemMap_us", "x", 1) + "\n" + rest,
		"line 2: expected 12 columns, got 2": head + "\n512,1\n",
		"line 2":                             head + "\nx" + strings.Repeat(",1", 11) + "\n",
	} {
		if _, err := parseCosts(bad); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want an error with %q", err, name)
		}
	}
}
