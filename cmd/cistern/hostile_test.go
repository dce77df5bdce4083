package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/internal/cputime"
	"github.com/cistern-gpu/cistern/report"
)

// Whole commands over recordings that were made to hurt. A valid recording is changed by its structure (a field of any record
// gets another value, lists are repeated, cut and mixed), written in one of the formats, sometimes compressed and sometimes
// with changed bytes, and a command reads it. CISTERN_HOSTILE is the number of inputs for each command, CISTERN_HOSTILE_SEED
// the first input's number, CISTERN_HOSTILE_KEEP a folder for the worst inputs. CPU time is counted for the whole process, so
// that only processes can share the work (scripts/hostile.sh).

// hostileMax is the size of the files that the bounds are promised for.
const hostileMax = 64 << 10

// What a command may take of such a file: the promise is 2 s and 256 MiB. Allocated bytes are counted in all, what was freed
// meanwhile included, so that they are the same in every run; time is the process's CPU time with room for a busy machine.
const (
	hostilePromise = 2 * time.Second
	hostileCPU     = 20 * time.Second
	hostileBytes   = 4 << 30
)

// hostileCommands are the commands that read recordings, with what input n is given to: variant n modulo their number. IN is
// the file, OTHER a second one and OUT an output without ending.
var hostileCommands = []struct {
	name     string
	variants []string
}{
	{"inspect", []string{"inspect IN", "inspect --json IN"}},
	{"replay", []string{
		"replay IN",
		"replay --policy torch-async --policy rmm-pool --policy direct --policy torch:expandable_segments:True IN",
		"replay --capacity 2GiB --policy torch:garbage_collection_threshold:0.5,max_split_size_mb:64 --policy cistern IN",
		"replay --policy torch --verify IN",
		"replay --policy cistern --record OUT.pickle IN",
	}},
	{"tune", []string{"tune IN"}},
	{"report", []string{"report IN", "report -o OUT.html IN"}},
	{"diff", []string{"diff IN OTHER"}},
	{"convert", []string{"convert IN -o OUT.cistern", "convert IN -o OUT.pickle", "convert IN -o OUT.pb.gz", "convert IN -o OUT.pftrace",
		"convert IN -o OUT.parquet", "convert IN -o OUT.csv"}},
}

func TestHostileRecordings(t *testing.T) {
	n, seed := hostileNumber(t, "CISTERN_HOSTILE", 20), hostileNumber(t, "CISTERN_HOSTILE_SEED", 1)
	for _, c := range hostileCommands {
		t.Run(c.name, func(t *testing.T) {
			h := hostileRun{t: t, dir: t.TempDir(), variants: c.variants}
			resetPeakResident()
			if report.CheckBundle() != nil { // built without the page
				h.variants = slices.DeleteFunc(slices.Clone(h.variants), func(v string) bool { return strings.Contains(v, ".html") })
			}
			for i := range n {
				h.one(seed + i)
			}
			// scripts/hostile.sh adds these lines up.
			t.Logf("hostile: %s inputs %d read %d cpu_ms %d over %d most_ms %d at %d most_kib %d at %d resident_kib %d", c.name, n, h.read,
				h.total.Milliseconds(), h.over, h.cpu.Milliseconds(), h.cpuAt, h.bytes>>10, h.bytesAt, h.resident)
			h.keep(c.name)
		})
	}
}

// hostileNumber is the number that a variable is set to.
func hostileNumber(t *testing.T, name string, otherwise uint64) uint64 {
	s := os.Getenv(name)
	if s == "" {
		return otherwise
	}
	x, err := strconv.ParseUint(s, 10, 63)
	if err != nil {
		t.Fatalf("%s=%q: want a number", name, s)
	}
	return x
}

// peakResident is the most memory that this process has had in KiB, 0 where the system does not tell.
func peakResident() (kib uint64) {
	b, _ := os.ReadFile("/proc/self/status")
	if _, rest, ok := strings.Cut(string(b), "VmHWM:"); ok {
		_, _ = fmt.Sscan(rest, &kib)
	}
	return kib
}

// resetPeakResident gives free memory back and lets peakResident begin anew, where the system can.
func resetPeakResident() {
	debug.FreeOSMemory()
	_ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0)
}

// hostileRun is one command over many inputs.
type hostileRun struct {
	t        *testing.T
	dir      string
	variants []string
	read     int // inputs that the command did not refuse
	over     int // inputs that took more than hostilePromise
	total    time.Duration
	cpu      time.Duration
	cpuAt    uint64
	bytes    uint64
	bytesAt  uint64
	resident uint64 // KiB, at most
}

// one runs the command on input number n. The file's name says the number, for when the process crashes.
func (h *hostileRun) one(n uint64) {
	args := h.variants[n%uint64(len(h.variants))]
	in, other := filepath.Join(h.dir, fmt.Sprint("input", n)), filepath.Join(h.dir, "other")
	before := allocatedBytes()
	input := hostileInput(n)
	if allocatedBytes()-before > 32<<20 {
		resetPeakResident() // what making the input took is not the command's
	}
	files := map[string][]byte{in: input}
	if strings.Contains(args, "OTHER") {
		files[other] = hostileInput(n + hostileOther)
	}
	for path, b := range files {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			h.t.Fatal(err)
		}
	}
	var words []string
	for _, w := range strings.Fields(args) {
		switch {
		case w == "IN":
			w = in
		case w == "OTHER":
			w = other
		case strings.HasPrefix(w, "OUT"):
			w = filepath.Join(h.dir, "out") + w[3:]
		}
		words = append(words, w)
	}
	allocated := allocatedBytes()
	cpu := cputime.Process()
	var errs bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), 10*hostileCPU)
	code := run(ctx, words, strings.NewReader(""), io.Discard, &errs)
	late := ctx.Err() != nil
	cancel()
	cpu = cputime.Process() - cpu
	allocated = allocatedBytes() - allocated
	h.count(n, code, cpu, allocated)
	h.resident = max(h.resident, peakResident())
	if late || cpu > hostileCPU || allocated > hostileBytes {
		h.t.Errorf("%s, input %d of %d bytes: %v of CPU, %d MiB allocated", args, n, len(input), cpu, allocated>>20)
	}
	if code != exitOK && code != exitBad && code != exitMismatch || strings.Contains(errs.String(), "goroutine ") {
		h.t.Errorf("%s, input %d: code %d, %q", args, n, code, errs.String())
	}
	if err := os.Remove(in); err != nil {
		h.t.Error(err)
	}
}

func (h *hostileRun) count(n uint64, code int, cpu time.Duration, allocated uint64) {
	h.total += cpu
	if code != exitBad {
		h.read++
	}
	if cpu > hostilePromise {
		h.over++
		h.t.Logf("input %d: %v of CPU", n, cpu)
	}
	if cpu > h.cpu {
		h.cpu, h.cpuAt = cpu, n
	}
	if allocated > h.bytes {
		h.bytes, h.bytesAt = allocated, n
	}
}

// allocatedBytes is what this process ever allocated on Go's heap.
func allocatedBytes() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// keep writes the worst inputs to the folder that was asked for.
func (h *hostileRun) keep(name string) {
	dir := os.Getenv("CISTERN_HOSTILE_KEEP")
	if dir == "" {
		return
	}
	for what, n := range map[string]uint64{"cpu": h.cpuAt, "bytes": h.bytesAt} {
		for suffix, n := range map[string]uint64{"": n, "-other": n + hostileOther} {
			if err := os.WriteFile(filepath.Join(dir, name+"-"+what+suffix), hostileInput(n), 0o600); err != nil {
				h.t.Fatal(err)
			}
		}
	}
}

// hostileOther is added to an input's number for the second file of a command that takes two.
const hostileOther = 1 << 32
