package dump

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/internal/nopoll"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
)

// limits are the bounds on memory that were in force when a request failed, from any source: of the device's memory, and
// of the host's, which page-locked memory and contents that are put aside need.
func limits(a Source, oom *cistern.OutOfMemoryError, f *recording.Failure, getenv func(string) string) []recording.Limit {
	out := []recording.Limit{}
	if oom.DriverTotal != 0 {
		out = append(out, recording.Limit{Kind: "device", Bytes: oom.DriverTotal, From: "all memory that the driver reports"})
	}
	if oom.Limit != 0 {
		from := "the program: cistern_set_limit, or PyTorch's set_per_process_memory_fraction"
		if oom.Limit == a.Options().Limit {
			from = "setting limit:" + units.FormatBytes(oom.Limit)
		}
		out = append(out, recording.Limit{Kind: "cistern", Bytes: oom.Limit, From: from})
	}
	if oom.PoolLimit != 0 {
		out = append(out, recording.Limit{Kind: "pool", Bytes: oom.PoolLimit,
			From: fmt.Sprintf("the limit of pool {%d, %d}, which holds %s", oom.Pool[0], oom.Pool[1], units.FormatBytes(oom.PoolReserved))})
	}
	h := host{"/", getenv}
	out = append(out, h.mps(int(oom.Device))...)
	out = append(out, h.mig(f.Device, oom.DriverTotal)...)
	out = append(out, h.container()...)
	return append(out, rlimits()...)
}

// host is where a process runs.
type host struct {
	root   string
	getenv func(string) string
}

// mps is what CUDA's Multi-Process Service leaves to a client.
func (h host) mps(device int) (out []recording.Limit) {
	const pinned, threads, pipes = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PIPE_DIRECTORY"
	// "0=1G,1=512M", by the ordinal of the device.
	for _, item := range strings.Split(h.getenv(pinned), ",") {
		n, size, ok := strings.Cut(strings.TrimSpace(item), "=")
		if d, err := strconv.Atoi(strings.TrimSpace(n)); !ok || err != nil || d != device {
			continue
		}
		if bytes, ok := mpsBytes(strings.TrimSpace(size)); ok {
			out = append(out, recording.Limit{Kind: "mps", Bytes: bytes, From: pinned + "=" + h.getenv(pinned)})
		}
	}
	if v := h.getenv(threads); v != "" {
		out = append(out, recording.Limit{Kind: "mps", From: threads + "=" + v})
	}
	folder := cmp.Or(h.getenv(pipes), "/tmp/nvidia-mps")
	if _, err := os.Stat(filepath.Join(h.root, folder, "control")); err == nil {
		out = append(out, recording.Limit{Kind: "mps", From: "a server whose pipes are in " + folder})
	}
	return out
}

// mpsBytes reads a size as MPS writes it: a number with G or M behind it.
func mpsBytes(s string) (uint64, bool) {
	unit := uint64(1)
	switch {
	case strings.HasSuffix(strings.ToUpper(s), "G"):
		unit = 1 << 30
	case strings.HasSuffix(strings.ToUpper(s), "M"):
		unit = 1 << 20
	}
	n, err := strconv.ParseUint(strings.TrimRight(s, "gGmM"), 10, 32)
	return n * unit, err == nil
}

// mig is the instance of a divided GPU that the process was given.
func (h host) mig(device string, total uint64) []recording.Limit {
	const visible = "CUDA_VISIBLE_DEVICES"
	if v := h.getenv(visible); strings.Contains(v, "MIG-") {
		return []recording.Limit{{Kind: "mig", Bytes: total, From: visible + "=" + v}}
	}
	if strings.Contains(device, " MIG ") {
		return []recording.Limit{{Kind: "mig", Bytes: total, From: device}}
	}
	return nil
}

// container is the tightest bound on host memory among the control groups that the process is in.
func (h host) container() []recording.Limit {
	text, err := nopoll.ReadFile(filepath.Join(h.root, "proc/self/cgroup"))
	if err != nil {
		return nil
	}
	least := recording.Limit{Kind: "container", Bytes: math.MaxUint64}
	for _, line := range strings.Split(string(text), "\n") {
		f := strings.SplitN(line, ":", 3) // number:controllers:path
		if len(f) != 3 {
			continue
		}
		top, file := "/sys/fs/cgroup", "memory.max"
		if f[1] != "" { // version 1 has a tree for each controller
			if !slices.Contains(strings.Split(f[1], ","), "memory") {
				continue
			}
			top, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
		}
		// The path may be as the host sees it: then what the container sees is the top alone.
		for at := path.Clean("/" + f[2]); ; at = path.Dir(at) {
			name := path.Join(top, at, file)
			if value, err := nopoll.ReadFile(filepath.Join(h.root, name)); err == nil {
				// Version 1 says "none" by the largest number of pages.
				n, err := strconv.ParseUint(strings.TrimSpace(string(value)), 10, 64)
				if err == nil && n < least.Bytes && n < 1<<60 {
					least.Bytes, least.From = n, name
				}
			}
			if at == "/" {
				break
			}
		}
	}
	if least.From == "" {
		return nil
	}
	return []recording.Limit{least}
}
