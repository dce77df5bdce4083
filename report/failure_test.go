package report

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/internal/slow"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

var rewriteFailures = flag.Bool("rewrite-failures", false, "take the texts that testdata/failures holds from what is written now")

// failedTrace is smallTrace up to its failure, as a process on Cistern writes it.
func failedTrace() *recording.Trace {
	t := smallTrace()
	t.Path, t.Format = "oom-4711-1.cistern", recording.FormatCistern
	t.Frames[0].File = "\x1b[2Jevil.py"
	t.Tags, t.Libraries, t.Threads = []string{"", "weights"}, []string{"", "torch"}, map[uint32]string{9: "load\ner"}
	for i := range t.Events {
		if e := &t.Events[i]; e.Kind == event.OOM {
			t.Events = t.Events[:i+1]
			break
		}
	}
	last := len(t.Events) - 1
	for i := range t.Events {
		t.Events[i].Tag, t.Events[i].Library, t.Events[i].Thread = uint16(i%2), uint8(i%2), 8+uint32(i%2)
	}
	t.Events[last].Stack = 1
	t.Failures = []*recording.Failure{{Event: last, PID: 4711, Program: []string{"python", "train.py", "--big"}, Version: "1.2.3",
		Conf: "limit:68MiB,stages:grow,report:/var/oom", Lines: []string{"out of memory on device 0", "allocated: weights", "try: less"},
		Requested: 30*mib - 5, Need: 30 * mib, Tag: 1, Library: 1, Thread: 9, Stack: 1, Device: "NVIDIA H200", UUID: "GPU-1",
		DeviceTotal: 100 * mib, DeviceFree: 8 * mib, Reserved: 60 * mib, Allocated: 40 * mib, Cached: 20 * mib, Pinned: mib, Largest: 8 * mib, Limit: 68 * mib,
		Steps: []recording.FailureStep{{Stage: "fit", Tries: 1}, {Stage: "remap", Note: "off by the settings"},
			{Stage: "grow", Tries: 2, Gained: 4 * mib, TookUS: 1234, Note: "CUDA_ERROR_OUT_OF_MEMORY"}},
		Limits: []recording.Limit{{Kind: "device", Bytes: 100 * mib}, {Kind: "cistern", Bytes: 68 * mib, From: "CISTERN_CONF"}},
		Others: []recording.Neighbour{{PID: 4711, Name: "python", Bytes: 62 * mib, Self: true}, {PID: 7, Name: "Xorg"}, {PID: 12, Name: "jupyter", Bytes: 30 * mib}}}}
	return t
}

// silentTrace is what is left of a process that kept no history.
func silentTrace() *recording.Trace {
	t := failedTrace()
	t.Events = nil
	f := t.Failures[0]
	f.Event, f.Others, f.OthersUnknown, f.Limit, f.DeviceFree = -1, nil, "NVML: no such library", 0, 40*mib-1
	t.Initial = []recording.Block{{Addr: 1 << 40, Size: 38 * mib, Requested: 38 * mib, Stack: 1, Tag: 1, State: recording.Active}}
	return t
}

func failuresOf(t *testing.T, tr *recording.Trace) *analyze.TraceFailures {
	t.Helper()
	r, err := analyze.ReportFailures(context.Background(), tr, nil, analyze.RemedyOptions{GPULag: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// The texts are in testdata/failures, to be read. The figures of what was replayed are set here: they are analyze's to
// test, and change as the engine improves.
func TestFailureText(t *testing.T) {
	known := failedTrace()
	known.Environment = recording.Environment{PyTorch: "2.11.0+cu130", CUDA: "13.0", Driver: "580.65.06", Device: "NVIDIA H200 \x1b[2J", DeviceTotal: 100 * mib}
	full := failuresOf(t, known)
	x := full.Failures[0]
	if !x.Searched || len(x.Remedies) == 0 {
		t.Fatalf("%+v", x.Search)
	}
	remedy := func(kind, title string, peak uint64, breaks ...string) analyze.Remedy {
		return analyze.Remedy{Kind: kind, Title: title, Capacity: 68 * mib, Peak: peak, Headroom: 68*mib - min(peak, 68*mib), DriverUS: 1500, DriverLeastUS: 675, Odds: replay.Odds{Replays: 32, Survived: 31}, Breaks: breaks,
			Verified: true, Survives: true}
	}
	handles := "cudaIpcGetMemHandle fails on this memory: libraries that share raw CUDA IPC handles stop working"
	first, second, third := remedy(analyze.RemedySetting, "take stages:grow out of CISTERN_CONF", 50*mib, handles),
		remedy(analyze.RemedyAllocator, "PyTorch's own allocator (start the program without cistern run), expandable_segments:True", 66*mib, handles, "another"),
		remedy(analyze.RemedySpill, "add spill:managed to CISTERN_CONF", 80*mib)
	first.Do, second.Do = "export CISTERN_CONF=limit:68MiB,report:/var/oom/of/a/job", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; export PYTORCH_ALLOC_CONF=expandable_segments:True"
	second.DoByVersion = []analyze.ForVersion{{Versions: "PyTorch up to 2.9", Do: "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"},
		{Versions: "PyTorch from 2.10 on", Do: "export PYTORCH_ALLOC_CONF=expandable_segments:True"}}
	first.Floor, second.WaitUS, second.Retries, third.Verified = 48*mib, 20000, 2, false
	x.Search = analyze.Search{Searched: true, Reproduced: true, Own: x.Own, Remedies: []analyze.Remedy{first, second, third}, Beaten: 3,
		Tried: []analyze.Remedy{{Title: "CISTERN_CONF=chunk:2MiB"}, {Title: "max_split_size_mb:128", Luck: true, Odds: replay.Odds{Replays: 32, Survived: 20}}, {Title: "backend:cudaMallocAsync", Barely: true}},
		More:  5 * mib, MoreFrom: "as much as earlier repeats asked for behind the same place",
		NotTried: []string{"4 replays and what would have followed from them: the time for them (--budget 1s) was used up"},
		Floors:   []analyze.Floor{{Who: "the run's own settings", Capacity: 90 * mib}}, LargestRequest: 12 * mib, Replays: 17, TookS: 0.25}
	x.Sentence = fixed(x, first.Title)
	full.Notes = append(full.Notes, "a note that is longer than a line is wide goes on in the next one, indented, without a need to scroll")
	nothing := failuresOf(t, failedTrace())
	y := nothing.Failures[0]
	y.Search = analyze.Search{Searched: true, Own: x.Own, Replays: 9, TookS: 61, Caveat: "nothing is certain", Floors: []analyze.Floor{{Who: "Cistern", Capacity: 75 * mib}}}
	y.Growth = analyze.Growth{Known: true, Repeats: 12, DurationUS: 9e6, Before: 10 * mib, After: 30 * mib, Steady: []analyze.Grown{
		{Named: analyze.Named{Name: "append_loss train.py:77"}, Before: mib, After: 21 * mib, Blocks: 400}}}
	y.Shortage, y.LessLive = 6*mib, y.Held.Stack[:1]
	y.Relief = []analyze.Relief{{Class: "optimizer state", Advice: "an optimizer with less state, or state that is sharded or offloaded to the host", Bytes: 24 * mib, Blocks: 3},
		{Class: analyze.ClassNoStack, Bytes: 12 * mib, Blocks: 3}}
	y.Sentence = fixed(y, "no setting that was tried meets it; allocate less")
	pooled := failedTrace()
	f := pooled.Failures[0]
	f.Pool, f.PoolLimit, f.PoolHolds, f.DeviceFree, f.Limit = recording.PoolID{0, 3}, 40*mib, 36*mib, 50*mib, 0
	barely := failuresOf(t, failedTrace())
	barely.Failures[0].Search = analyze.Search{Searched: true, Reproduced: true, Tried: []analyze.Remedy{{Title: "CISTERN_CONF=chunk:2MiB", Barely: true}},
		More: 5 * mib, MoreFrom: "a hundredth of the memory, as no two runs are the same"}
	barely.Failures[0].Relief, barely.Failures[0].StacksBy = nil, "cistern run --stacks python --report oom -- PROGRAM"
	barely.Failures[0].Sentence = fixed(barely.Failures[0], "allocate less; stacks would name the allocations: cistern run --stacks python --report oom -- PROGRAM")
	cut := silentTrace() // of the file only the process's words are left
	cut.Initial, cut.Failures[0].Cut = nil, true
	for name, r := range map[string]*analyze.TraceFailures{"full": full, "nothing": nothing, "barely": barely, "pool": failuresOf(t, pooled), "silent": failuresOf(t, silentTrace()), "cut": failuresOf(t, cut)} {
		var b bytes.Buffer
		WriteFailures(&b, r, Style{})
		got := b.String()
		for line := range strings.Lines(got) {
			line = strings.TrimSuffix(line, "\n")
			if len([]rune(line)) > 80 || strings.TrimRight(line, " ") != line || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' }) {
				t.Errorf("%s: the line %q does not fit or is not clean", name, line)
			}
		}
		path := filepath.Join("testdata/failures", name+".txt")
		if *rewriteFailures {
			if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s differs from %s:\n%s", name, path, got)
		}
		var c bytes.Buffer // colours add nothing but colours
		WriteFailures(&c, r, Style{Color: true})
		if plain := colors.ReplaceAllString(c.String(), ""); plain != got {
			t.Errorf("%s, coloured, says something else:\n%s", name, plain)
		}
	}
}

// fixed is the first line of a failure with another fix.
func fixed(x *analyze.FailureReport, fix string) string {
	what, _, _ := strings.Cut(x.Sentence, ". Fix: ")
	return what + ". Fix: " + fix
}

// TestSlowFailureInBrowser opens pages of runs in which a request failed (web/test/failure.mjs), as TestPageInBrowser does.
func TestSlowFailureInBrowser(t *testing.T) {
	slow.Only(t)
	node, chromium := needBrowser(t)
	dir := t.TempDir()
	page := func(name string, tr *recording.Trace) (string, *analyze.FailureReport) {
		v, _ := viewOf(t, tr, []replay.Spec{{Name: "torch", Conf: "default", HasConf: true}}, replay.Options{Capacity: smallLimit})
		v.Failures = failuresOf(t, tr)
		for i := range v.Failures.Failures[0].Remedies {
			if m := &v.Failures.Failures[0].Remedies[i]; m.Kind == analyze.RemedySpill {
				m.Peak = m.Capacity + 3*mib
			}
		}
		v.Failures.Failures[0].Relief = []analyze.Relief{{Class: "optimizer state", Advice: "less state", Bytes: 12 * mib, Blocks: 3}}
		path := filepath.Join(dir, name)
		writePageFile(t, path, v)
		return path, v.Failures.Failures[0]
	}
	failedPage, x := page("failed.html", failedTrace())
	silentPage, y := page("silent.html", silentTrace())
	remedies := [][]any{}
	for _, m := range x.Remedies {
		remedies = append(remedies, []any{m.Title, m.Headroom})
	}
	expect := map[string]any{
		"failure": map[string]any{"page": failedPage, "first": x.Sentence + ".", "relief": "", "remedies": remedies, "allocated": x.Held.Allocated, "live": x.Live, "policies": 0,
			"kinds": []string{"tag", "library", "thread", "size", "age", "stack"}, "hostile": `</script><img src=x onerror="window.hacked=1">`,
			"texts": append([]string{x.Sentence, "checked by replay of", "CUDA_ERROR_OUT_OF_MEMORY", "off by the settings", "12 jupyter", "30.00 MiB",
				"limit: cistern", "68.00 MiB, CISTERN_CONF", "NVIDIA H200 GPU-1", "python train.py --big", "allocated: weights", "none: 3.00 MiB in the host's memory"}, x.Why...)},
		"silent": map[string]any{"page": silentPage, "first": y.Sentence + ".", "relief": "optimizer state\t12.00 MiB\t3\tless state",
			"texts": []string{y.Sentence, "Nothing was replayed: the history was off", "NVML: no such library"}},
	}
	data, err := json.Marshal(expect)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "expect.json")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), node, "web/test/failure.mjs", chromium, file).CombinedOutput()
	if err != nil {
		t.Fatalf("the page is not as it should be: %v\n%s", err, bytes.TrimSpace(out))
	}
}

// colors are a terminal's.
var colors = regexp.MustCompile("\x1b\\[[0-9;]*m")

// A process that kept no history wrote what it held, and nothing of when: there is no event to name.
func TestInspectionWithoutEvents(t *testing.T) {
	tr := failedTrace()
	tr.Events, tr.Failures = nil, nil
	tr.Initial = []recording.Block{{Addr: 1 << 30, Requested: 5 << 20, Size: 5 << 20, State: recording.Active}}
	var b bytes.Buffer
	WriteInspection(&b, analyze.Inspect(tr), Style{})
	if s := b.String(); !strings.Contains(s, "\npeak before the first event\n") || !strings.Contains(s, "5.00 MiB") || strings.Contains(s, "event -1") {
		t.Errorf("it says\n%s", s)
	}
}
