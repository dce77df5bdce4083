package report

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/replay"
	"github.com/cistern-gpu/cistern/trace"
)

// TestTables reads the tables of pages with the page's own code (web/test/tables.mjs) and holds the moments that it
// computes from them against analyze's: totals, holders by stack, sizes, the address map, and the driver calls.
func TestTables(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		if os.Getenv("CISTERN_BROWSER_TEST") == "1" {
			t.Fatalf("the test needs node: %v", err)
		}
		t.Skipf("the test needs node: %v", err)
	}
	files, _ := filepath.Glob("../trace/testdata/*.pickle.gz")
	if dir := os.Getenv("CISTERN_TRACES"); dir != "" && !testing.Short() {
		more, _ := filepath.Glob(filepath.Join(dir, "*.pickle.gz"))
		files = append(files, more...)
	}
	traces := []*trace.Trace{smallTrace()}
	for _, path := range files {
		f, err := trace.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		traces = append(traces, f.Traces...)
	}
	for _, tr := range traces {
		in := analyze.Inspect(tr)
		v, err := NewView(tr, in, &replay.Report{})
		if err != nil {
			t.Fatal(err)
		}
		counts := tr.Counts()
		var calls []any
		for k := event.SegmentAlloc; k <= event.SegmentUnmap; k++ {
			if counts[k] > 0 {
				calls = append(calls, []any{k.String(), counts[k]})
			}
		}
		r := rand.New(rand.NewPCG(uint64(len(tr.Events)), 2))
		moments := []any{}
		for _, at := range []int{-1, in.Peak.Event, r.IntN(len(tr.Events)), r.IntN(len(tr.Events)), len(tr.Events) - 1} {
			moments = append(moments, expectedMoment(analyze.MomentAt(tr, at)))
		}
		data, err := json.Marshal(map[string]any{"series": v.series, "curves": len(v.Lines), "frames": v.Frames,
			"events": len(tr.Events), "moments": moments, "calls": calls, "max_holders": analyze.MaxHolders})
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "expect.json")
		if err := os.WriteFile(file, data, 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), node, "web/test/tables.mjs", file).CombinedOutput(); err != nil {
			t.Errorf("%s, device %d: %v\n%s", tr.Path, tr.Device, err, out)
		}
	}
}

// expectedMoment is a moment for tables.mjs.
func expectedMoment(m analyze.Moment) map[string]any {
	holders, sizes, segments := []any{}, []any{}, []any{}
	for _, h := range m.Holders {
		frames := h.Frames
		if frames == nil {
			frames = []string{}
		}
		holders = append(holders, []any{frames, h.Bytes, h.Blocks})
	}
	for _, x := range m.Sizes {
		sizes = append(sizes, []any{x.Bytes, x.Blocks})
	}
	for _, g := range m.Map.Segments {
		flags, pending, live := 0, 0, uint64(0)
		if g.Expandable {
			flags |= 1
		}
		if g.Inferred {
			flags |= 2
		}
		for _, b := range g.Blocks {
			live += b.Request
			if b.Pending {
				pending++
			}
		}
		segments = append(segments, []any{g.Addr, g.Size, g.Stream, g.Pool, flags, len(g.Blocks), live, pending})
	}
	return map[string]any{"event": m.Event, "live": m.Live, "blocks": m.Blocks, "free": m.FreeBytes, "pieces": m.FreePieces,
		"largest": m.LargestFree, "holders": holders, "others": []any{m.Others.Bytes, m.Others.Blocks}, "sizes": sizes,
		"segments": segments}
}
