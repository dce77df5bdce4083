package replay

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/event"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/open"
)

// Quantiles are the least times that so many of the requests do not exceed.
func TestLatency(t *testing.T) {
	var none requestTimes
	if l := none.latency(); l != (Latency{}) {
		t.Errorf("of no requests: %+v", l)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		var r requestTimes
		var all []float64
		for range 1 + rng.IntN(3000) {
			us := float64(rng.IntN(1000) * rng.IntN(2))
			r.add(time.Duration(us) * time.Microsecond)
			all = append(all, us)
		}
		slices.Sort(all)
		l := r.latency()
		for q, got := range map[int]float64{500: l.P50, 990: l.P99, 999: l.P999, 1000: l.Max} {
			if want := all[(q*len(all)+999)/1000-1]; got != want {
				t.Fatalf("%d of 1000 of %d requests took at most %g us, want %g", q, len(all), got, want)
			}
		}
	}
}

func TestMeanReserved(t *testing.T) {
	var m meanReserved
	if m.value() != 0 {
		t.Error("a mean without time")
	}
	m.until(0, 100)
	m.until(1, 100)
	m.until(4, 500)
	m.until(3, 9000)
	if n := m.value(); n != 400 {
		t.Errorf("the mean of 1 us of 100 and 3 us of 500 bytes is %d", n)
	}
	m = meanReserved{}
	m.until(1<<50, maxLive)
	if n := m.value(); n != maxLive {
		t.Errorf("the mean of a large constant is %d", n)
	}
}

// run replays a recording of testdata under one policy.
func runRecorded(t *testing.T, name, policy string, opt Options) *Result {
	t.Helper()
	f, err := open.File(filepath.Join("..", "recording", "testdata", name+".pickle.gz"))
	if err != nil {
		t.Fatal(err)
	}
	spec, err := ParseSpec(policy)
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewPlan(f.Traces[0]).Run(spec, opt)
	if err != nil {
		t.Fatalf("%s: %v", policy, err)
	}
	return r
}

// A limit of free memory lowers what is reserved over time and costs driver time; it gives the same result in every replay. One
// that is never reached changes nothing.
func TestCacheLimitReplayed(t *testing.T) {
	const name = "multistream_prefetch"
	opt := Options{GPULag: 20 * time.Millisecond}
	free := runRecorded(t, name, "cistern", opt)
	if r := runRecorded(t, name, "cistern:cache_limit:1TiB", opt); r.DriverTimeUS != free.DriverTimeUS || r.MeanReserved != free.MeanReserved ||
		r.PeakReserved != free.PeakReserved || r.Requests != free.Requests {
		t.Errorf("a limit that is never reached: %+v, want %+v", r, free)
	}
	for _, decay := range []string{"0s", "100ms"} {
		policy := "cistern:cache_limit:64MiB,cache_decay:" + decay
		r := runRecorded(t, name, policy, opt)
		if r.MeanReserved >= free.MeanReserved || r.DriverTimeUS <= free.DriverTimeUS || !r.Completed {
			t.Errorf("%s: mean reserved %d, driver time %.0f us; %d and %.0f us without", policy, r.MeanReserved, r.DriverTimeUS, free.MeanReserved, free.DriverTimeUS)
		}
		if again := runRecorded(t, name, policy, opt); again.MeanReserved != r.MeanReserved || again.DriverTimeUS != r.DriverTimeUS || again.Requests != r.Requests {
			t.Errorf("%s: two replays differ: %+v, %+v", policy, r, again)
		}
	}
}

// So does the release threshold of a stream-ordered pool, the lower the more.
func TestReleaseThreshold(t *testing.T) {
	free := runRecorded(t, "gpt2_varlen", "torch-async", Options{})
	last := free
	for _, threshold := range []string{"1TiB", "24GiB", "16GiB", "0"} {
		r := runRecorded(t, "gpt2_varlen", "torch-async:release_threshold:"+threshold, Options{})
		if r.MeanReserved > last.MeanReserved || r.DriverTimeUS < last.DriverTimeUS || r.DeviceSyncs != 0 {
			t.Errorf("threshold %s: mean reserved %d, driver time %.0f us, %d waits; %d and %.0f us before", threshold, r.MeanReserved,
				r.DriverTimeUS, r.DeviceSyncs, last.MeanReserved, last.DriverTimeUS)
		}
		last = r
	}
	if last.MeanReserved > free.MeanReserved*9/10 {
		t.Errorf("threshold 0 reserves %d in the mean, %d without one", last.MeanReserved, free.MeanReserved)
	}
	if r := runRecorded(t, "gpt2_varlen", "torch-async:release_threshold:16GiB,sync_interval:1h", Options{}); r.MeanReserved != free.MeanReserved {
		t.Errorf("%d bytes in the mean without a synchronization, want %d", r.MeanReserved, free.MeanReserved)
	}
}

// Memory that goes while the program does nothing is not reserved from then on.
func TestMeanReservedOfIdleProgram(t *testing.T) {
	const second = 1_000_000
	run := &recording.Trace{Streams: []uint64{0}, Pools: []recording.PoolID{{}}, Stacks: []recording.Stack{nil}, FromStart: true, Events: []event.Event{
		{Kind: event.Alloc, Addr: 1 << 40, Size: 1 << 30},
		{Kind: event.FreeCompleted, Addr: 1 << 40, Size: 1 << 30, TimeUS: second},
		{Kind: event.Alloc, Addr: 1 << 40, Size: 1 << 20, TimeUS: 1000 * second},
	}}
	for policy, seconds := range map[string]uint64{"cistern": 1000, "torch-async": 1000, "torch-async:release_threshold:0": 2, "torch-async:release_threshold:0,sync_interval:100s": 101,
		"cistern:cache_limit:2MiB,cache_decay:0s": 4, "cistern:cache_limit:2MiB,cache_decay:10s": 25} {
		spec, err := ParseSpec(policy)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Run(run, spec, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if most := seconds<<30/1000 + 16<<20; r.MeanReserved > most {
			t.Errorf("%s: %d bytes reserved in the mean; at most %d", policy, r.MeanReserved, most) // the last chunk of the limit stays
		}
		if least := seconds << 30 / 1000 / 4; r.MeanReserved < least {
			t.Errorf("%s: %d bytes reserved in the mean; at least %d", policy, r.MeanReserved, least)
		}
	}
}

func TestAsyncSettings(t *testing.T) {
	for text, want := range map[string]string{
		"":                            "",
		"release_threshold:2GiB":      "release_threshold:2147483648",
		"release_threshold:0":         "release_threshold:0",
		"sync_interval:1s":            "sync_interval:1s",
		"sync_interval:100ms":         "",
		"release_threshold:lots":      "error: setting release_threshold:lots: ",
		"sync_interval:10":            "error: setting sync_interval:10: ",
		"sync_interval:1ns":           "error: setting sync_interval:1ns: expected a time of 1µs or more",
		"threshold:1":                 `error: unknown setting "threshold": the keys are release_threshold, sync_interval`,
		"release_threshold:1GiB,":     `error: unknown setting "": the keys are`,
		"backend:cudaMallocAsync":     `error: unknown setting "backend"`,
		"release_threshold:1GiB:2GiB": "error: setting release_threshold:1GiB:2GiB: ",
	} {
		c, err := parseAsync(text)
		got := c.String()
		if err != nil {
			got = "error: " + err.Error()
		}
		if got != want && (err == nil || !strings.HasPrefix(got, want)) {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// Settings are read as they are written, and no text ends the program.
func FuzzAsyncSettings(f *testing.F) {
	f.Add("release_threshold:2GiB,sync_interval:1s")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseAsync(text)
		if err != nil {
			return
		}
		if again, err := parseAsync(c.String()); err != nil || again != c {
			t.Fatalf("%q is written %q, which is read %+v, %v", text, c, again, err)
		}
	})
}
