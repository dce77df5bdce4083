package replay

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/recording/open"
)

// Placement hashes pin what the engine does, so that a change of its shape can be distinguished from a change of its behaviour. A
// hash covers, in order, every address that policy cistern hands out or gives back and every driver call with its
// arguments and results. A change that must not alter behaviour leaves testdata/placements as it is. A change of behaviour
// writes the file anew (go test ./replay -run TestPlacementHashes -rewrite, with CISTERN_TRACES) in a commit that says why.

const placementsFile = "testdata/placements"

// placementRun is one replay that is pinned.
type placementRun struct {
	conf  string
	limit float64 // of the peak of requested bytes; 0 is no limit
}

func TestPlacementHashes(t *testing.T) {
	rewrite := rewriting()
	want := readPlacements(t)
	got := map[string]string{}
	for _, path := range placementTraces(t) {
		f, err := open.File(path)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(path), ".pickle.gz")
		runs := []placementRun{{}, {limit: 1.01}, {conf: "cross_stream:ready"}}
		if strings.Contains(path, filepath.Join("recording", "testdata")) {
			name = "testdata/" + name
			runs = append(runs, placementRun{conf: "chunk:2MiB"}, placementRun{conf: "chunk:64MiB", limit: 1.05},
				placementRun{conf: "backend:malloc"}, placementRun{conf: "single_handle:true"}, placementRun{conf: "stages:grow"})
		}
		for _, tr := range f.Traces {
			plan := NewPlan(tr)
			for _, run := range runs {
				for _, lag := range lags {
					key := fmt.Sprintf("%s gpu%d conf=%s limit=%g lag=%v", name, tr.Device, run.conf, run.limit, lag)
					got[key] = placementHash(t, plan, run, lag)
					if !rewrite && got[key] != want[key] {
						t.Errorf("%s: %s, want %s", key, got[key], want[key])
					}
				}
			}
		}
	}
	if rewrite {
		writePlacements(t, want, got)
	}
}

// rewriting reports the flag that transcripts are written anew with.
func rewriting() bool { return slices.Contains(os.Args, "-rewrite") }

// placementTraces are the committed recordings, and those of CISTERN_TRACES.
func placementTraces(t *testing.T) []string {
	var paths []string
	for _, name := range smallTraces(t) {
		paths = append(paths, filepath.Join("..", "recording", "testdata", name))
	}
	if dir := os.Getenv("CISTERN_TRACES"); dir != "" {
		more, err := filepath.Glob(filepath.Join(dir, "*.pickle.gz"))
		if err != nil || len(more) == 0 {
			t.Fatalf("no recordings in CISTERN_TRACES: %v", err)
		}
		paths = append(paths, more...)
	}
	return paths
}

func readPlacements(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(placementsFile)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	want := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, hash, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			want[key] = hash
		}
	}
	return want
}

// writePlacements replaces the lines of the replays that were made and keeps the others.
func writePlacements(t *testing.T, lines, got map[string]string) {
	t.Helper()
	for key, hash := range got {
		lines[key] = hash
	}
	var keys []string
	for key := range lines {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	f, err := os.Create(placementsFile)
	if err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriter(f)
	for _, key := range keys {
		fmt.Fprintf(w, "%s: %s\n", key, lines[key])
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// placementHash replays one run and returns its hash, with what it counted for a reader to see how far two runs differ.
func placementHash(t *testing.T, plan *Plan, run placementRun, lag time.Duration) string {
	t.Helper()
	h := &placementHasher{}
	name := "cistern, hashed"
	factories[name] = func(env *Env) (Policy, string, error) {
		p, conf, err := newEngineOver(env, func(drv cuda.Driver) cuda.Driver { return &hashedDriver{drv, h} })
		if err != nil {
			return nil, "", err
		}
		return &hashedEngine{p.(*engine), h}, conf, nil
	}
	defer delete(factories, name)
	opt := Options{GPULag: lag}
	if run.limit != 0 {
		opt.Capacity = uint64(run.limit * float64(plan.PeakLive))
	}
	r, err := plan.Run(Spec{Name: name, Conf: run.conf, HasConf: true}, opt)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%016x placements=%d calls=%d reserved=%d completed=%v", h.sum, h.placements, h.calls, r.PeakReserved, r.Completed)
}

// placementHasher is FNV-1a over 64-bit words, which is cheap beside a replay; it need not resist attacks.
type placementHasher struct {
	sum               uint64
	placements, calls int
}

func (h *placementHasher) add(words ...uint64) {
	var b [8]byte
	for _, w := range words {
		binary.LittleEndian.PutUint64(b[:], w)
		for _, x := range b {
			h.sum = (h.sum ^ uint64(x)) * 0x100000001b3
		}
	}
}

func (h *placementHasher) call(name string, err error, words ...uint64) {
	h.calls++
	for _, x := range []byte(name) {
		h.sum = (h.sum ^ uint64(x)) * 0x100000001b3
	}
	if err != nil {
		words = append(words, ^uint64(0))
	}
	h.add(words...)
}

// hashedEngine hashes what is handed out and given back.
type hashedEngine struct {
	*engine
	h *placementHasher
}

func (e *hashedEngine) Alloc(b int, size uint64, stream, pool uint32) (uint64, error) {
	addr, err := e.engine.Alloc(b, size, stream, pool)
	e.h.placements++
	e.h.add(uint64(b), addr)
	return addr, err
}

func (e *hashedEngine) Free(b int) error {
	e.h.add(uint64(b))
	return e.engine.Free(b)
}

// hashedDriver hashes the calls by which the engine gets, places, orders and gives back memory.
type hashedDriver struct {
	cuda.Driver
	h *placementHasher
}

func (d *hashedDriver) MemAlloc(dev cuda.Device, size uint64) (cuda.Ptr, error) {
	p, err := d.Driver.MemAlloc(dev, size)
	d.h.call("MemAlloc", err, size, uint64(p))
	return p, err
}

func (d *hashedDriver) MemFree(dev cuda.Device, p cuda.Ptr) error {
	err := d.Driver.MemFree(dev, p)
	d.h.call("MemFree", err, uint64(p))
	return err
}

func (d *hashedDriver) AddressReserve(size, align uint64, hint cuda.Ptr) (cuda.Ptr, error) {
	p, err := d.Driver.AddressReserve(size, align, hint)
	d.h.call("AddressReserve", err, size, align, uint64(hint), uint64(p))
	return p, err
}

func (d *hashedDriver) AddressFree(p cuda.Ptr, size uint64) error {
	err := d.Driver.AddressFree(p, size)
	d.h.call("AddressFree", err, uint64(p), size)
	return err
}

func (d *hashedDriver) MemCreate(size uint64, prop cuda.MemProp) (cuda.Handle, error) {
	x, err := d.Driver.MemCreate(size, prop)
	d.h.call("MemCreate", err, size, uint64(x))
	return x, err
}

func (d *hashedDriver) MemRelease(x cuda.Handle) error {
	err := d.Driver.MemRelease(x)
	d.h.call("MemRelease", err, uint64(x))
	return err
}

func (d *hashedDriver) MemMap(p cuda.Ptr, size uint64, x cuda.Handle) error {
	err := d.Driver.MemMap(p, size, x)
	d.h.call("MemMap", err, uint64(p), size, uint64(x))
	return err
}

func (d *hashedDriver) MemUnmap(p cuda.Ptr, size uint64) error {
	err := d.Driver.MemUnmap(p, size)
	d.h.call("MemUnmap", err, uint64(p), size)
	return err
}

func (d *hashedDriver) MemSetAccess(p cuda.Ptr, size uint64, devs []cuda.Device) error {
	err := d.Driver.MemSetAccess(p, size, devs)
	d.h.call("MemSetAccess", err, uint64(p), size, uint64(len(devs)))
	return err
}

func (d *hashedDriver) StreamWaitEvent(dev cuda.Device, s cuda.Stream, e cuda.Event) error {
	err := d.Driver.StreamWaitEvent(dev, s, e)
	d.h.call("StreamWaitEvent", err, uint64(s), uint64(e))
	return err
}

func (d *hashedDriver) StreamSynchronize(dev cuda.Device, s cuda.Stream) error {
	err := d.Driver.StreamSynchronize(dev, s)
	d.h.call("StreamSynchronize", err, uint64(s))
	return err
}

func (d *hashedDriver) ContextSynchronize(dev cuda.Device) error {
	err := d.Driver.ContextSynchronize(dev)
	d.h.call("ContextSynchronize", err)
	return err
}

func (d *hashedDriver) EventRecord(dev cuda.Device, e cuda.Event, s cuda.Stream) error {
	err := d.Driver.EventRecord(dev, e, s)
	d.h.call("EventRecord", err, uint64(e), uint64(s))
	return err
}

func (d *hashedDriver) EventQuery(dev cuda.Device, e cuda.Event) (bool, error) {
	done, err := d.Driver.EventQuery(dev, e)
	x := uint64(0)
	if done {
		x = 1
	}
	d.h.call("EventQuery", err, uint64(e), x)
	return done, err
}

func (d *hashedDriver) EventSynchronize(dev cuda.Device, e cuda.Event) error {
	err := d.Driver.EventSynchronize(dev, e)
	d.h.call("EventSynchronize", err, uint64(e))
	return err
}
