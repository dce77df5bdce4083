package open_test

import (
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/internal/recordingtest"
	"github.com/cistern-gpu/cistern/recording/open"
)

// recorded is what is known of the recorded traces from counting them independently, in Python.
type recorded struct {
	name     string
	device   int
	events   int
	streams  int
	live     uint64 // 0: not known
	reserved uint64
	got      int // -1: not known
	gaveBack int
	ooms     int
	start    bool
}

var largeTraces = []recorded{
	{"gpt2_varlen", 0, 325139, 1, 21524907032, 61666754560, 308, 0, 0, true},
	{"generate_serving", 0, 769256, 1, 4376806440, 5916065792, 97, 0, 0, true},
	{"detection", 0, 268481, 1, 16335134756, 31727812608, 152, 0, 0, true},
	{"multistream_prefetch", 0, 487975, 3, 7249229300, 12568231936, 233, 0, 0, true},
	{"gpt2_varlen.expandable", 0, 51009, 1, 21185221852, 22521315328, 270, 0, 0, true},
	{"detection.expandable.cap17", 0, 134661, 1, 16289146538, 17494441984, 150, 0, 0, true},
	{"gpt2_varlen.cap24", 0, 67295, 1, 21185221852, 25272778752, 298, 130, 0, true},
	{"generate_serving.pow2", 0, 167056, 1, 1278908712, 1614807040, 81, 0, 0, true},
	{"gpt2_varlen.stacks", 0, 26842, 1, 20530370312, 32956743680, 295, 0, 0, true},
	{"gpt2_varlen.expandable.cap20.6", 0, 131640, 1, 21495651688, 21661483008, 280, 23, 0, true},
	{"detection.cap16", 0, 81494, 1, 15540042283, 17047748608, 210, 107, 0, true},
	{"detection.gc07.cap20", 0, 81415, 1, 15540042283, 16783507456, 146, 68, 0, true},
	{"gnn.cap11", 0, 4325, 1, 7016515716, 10353639424, 30, 16, 1, true},
	{"gpt2_varlen.ring20000", 0, 20000, 1, 0, 40084963328, -1, -1, 0, false},
	{"detection.midrun", 0, 20790, 1, 0, 20833107968, -1, -1, 0, false},
	{"pools_graphs", 0, 3561, 3, 984398371, 1577058304, 96, 28, 0, true},
	{"two_devices", 0, 2069, 1, 1174257792, 0, 26, 0, 0, true},
	{"two_devices", 1, 2618, 1, 1180385416, 0, 35, 0, 0, true},
}

var smallTraces = []recorded{
	{"small/gpt2_varlen", 0, 51037, 1, 21185221852, 40084963328, 298, 0, 0, true},
	{"small/detection", 0, 41294, 1, 13254746136, 20833107968, 134, 0, 0, true},
	{"small/multistream_prefetch", 0, 16676, 3, 4728696228, 6484393984, 174, 0, 0, true},
}

func TestRecordedTraces(t *testing.T) {
	check := func(path string, w recorded) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			f, err := open.File(path)
			if err != nil {
				t.Fatal(err)
			}
			if f.Format != recording.FormatPyTorch {
				t.Errorf("format %q", f.Format)
			}
			var tr *recording.Trace
			for _, c := range f.Traces {
				if c.Device == w.device {
					tr = c
				}
			}
			if tr == nil {
				t.Fatalf("no trace of device %d", w.device)
			}
			live, _ := tr.PeakLive()
			got, gave := tr.RecordedSegmentEvents()
			if w.live == 0 {
				w.live = live
			}
			if w.got < 0 {
				w.got, w.gaveBack = got, gave
			}
			g := recorded{w.name, tr.Device, len(tr.Events), len(tr.Streams), live, tr.RecordedPeakReserved(), got, gave,
				tr.RecordedOOMs(), tr.FromStart}
			if w.reserved == 0 {
				w.reserved = g.reserved
			}
			if g != w {
				t.Errorf("got  %+v\nwant %+v", g, w)
			}
			if !tr.Settings.Known || tr.Settings.MaxSplitSize != -1 {
				t.Errorf("settings %+v", tr.Settings)
			}
			for _, n := range tr.Notes {
				t.Log(n)
			}
		})
	}
	if dir := recordingtest.TracesDir(); dir != "" {
		for _, w := range append(largeTraces, smallTraces...) {
			check(filepath.Join(dir, w.name+".pickle.gz"), w)
		}
	}
	for _, w := range smallTraces {
		check(filepath.Join("../testdata", filepath.Base(w.name)+".pickle.gz"), w)
	}
}
