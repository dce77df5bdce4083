package analyze

import (
	"bytes"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/open"
)

// Where neither stacks nor events were kept, the tags are named, what is missing comes in the driver's units, and the
// figures that are held against each other differ.
func TestFailureWithoutHistory(t *testing.T) {
	f := &recording.Failure{Event: -1, Requested: 35 * mib, Need: 35 * mib, Reserved: 4096 * mib, Allocated: 4062 * mib, Cached: 34 * mib,
		Largest: 14 * mib, DeviceTotal: 4096 * mib, Version: "1.2.3"}
	tr := &recording.Trace{Format: recording.FormatCistern, Tags: []string{"", "cache", "weights"}, Failures: []*recording.Failure{f},
		Initial: []recording.Block{{Addr: 0, Requested: 2062 * mib, Size: 2062 * mib, Tag: 1, State: recording.Active},
			{Addr: 4096 * mib, Requested: 2000 * mib, Size: 2000 * mib, Tag: 2, State: recording.Active}}}
	x := reportOn(t, tr, RemedyOptions{}).Failures[0]
	if x.Shortage != 2*mib || len(x.LessLive) != 1 || x.LessLive[0].Name != "tag cache" {
		t.Errorf("%d bytes short, less of %+v; want 2 MiB, of tag cache", x.Shortage, x.LessLive)
	}
	want := "4.001 GiB, 1.00 MiB more than the 4.000 GiB that there were. No allocator could have met it.\n" +
		"It takes 2.00 MiB more, or 2.00 MiB less in use at this moment."
	if why := strings.Join(x.Why, "\n"); !strings.HasSuffix(why, want) {
		t.Errorf("why: %s", why)
	}
	if !strings.HasPrefix(x.Unsearched, "the history was off") {
		t.Errorf("nothing was searched as %s", x.Unsearched)
	}
}

// Nothing can be gained from holders where the request alone is too large.
func TestFailureLargerThanAll(t *testing.T) {
	for _, f := range []recording.Failure{
		{Requested: 8192 * mib, Need: 8192 * mib, Reserved: 400 * mib, Allocated: 400 * mib, DeviceTotal: 4096 * mib, DeviceFree: 3696 * mib, Version: "1.2.3"},
		{Requested: 4096 * mib, Need: 4096 * mib, Reserved: 400 * mib, Allocated: 400 * mib, DeviceTotal: 4096 * mib, DeviceFree: 3696 * mib, Version: "1.2.3"},
	} {
		f.Event = -1
		x := reportOn(t, &recording.Trace{Format: recording.FormatCistern, Failures: []*recording.Failure{&f}}, RemedyOptions{}).Failures[0]
		why := strings.Join(x.Why, "\n")
		if alone := f.Need > x.Capacity; strings.Contains(why, "less in use") == alone || strings.Contains(why, "with nothing else in use") != alone {
			t.Errorf("%d bytes of %d: %s", f.Need, x.Capacity, why)
		}
	}
}

// A file that was cut off before the events is not taken for one of a process that kept no history.
func TestFailureCutOff(t *testing.T) {
	var file bytes.Buffer
	if err := native.Write(&file, &recording.File{Traces: []*recording.Trace{scattered(t, "limit:100MiB").trace()}}); err != nil {
		t.Fatal(err)
	}
	for n := file.Len() - 1; n > 0; n-- {
		got, err := open.Read(bytes.NewReader(file.Bytes()[:n]), "oom-1-1.cistern")
		if err != nil || len(got.Traces[0].Failures) == 0 || len(got.Traces[0].Events) > 0 {
			continue
		}
		x := reportOn(t, got.Traces[0], RemedyOptions{}).Failures[0]
		if !strings.HasPrefix(x.Unsearched, "the file was cut off") {
			t.Errorf("%d of %d bytes: nothing was searched as %s", n, file.Len(), x.Unsearched)
		}
		if want := got.Traces[0].Failures[0].Allocated; x.Live != want {
			t.Errorf("%d of %d bytes: %d bytes live, want the %d that were allocated", n, file.Len(), x.Live, want)
		}
		return
	}
	t.Fatal("no length leaves the failure without its events")
}
