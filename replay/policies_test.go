package replay

import (
	"path/filepath"
	"testing"

	"github.com/cistern-gpu/cistern/recording/open"
)

func TestPoliciesOverRecordedTraces(t *testing.T) {
	for _, name := range []string{"gpt2_varlen", "detection", "multistream_prefetch"} {
		f, err := open.File(filepath.Join("..", "recording", "testdata", name+".pickle.gz"))
		if err != nil {
			t.Fatal(err)
		}
		p := NewPlan(f.Traces[0])
		for _, s := range []string{"torch", "torch:default", "torch:expandable_segments:True", "torch-async", "rmm-pool", "direct"} {
			spec, err := ParseSpec(s)
			if err != nil {
				t.Fatal(err)
			}
			r, err := p.Run(spec, Options{})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s %s: ratio %.3f, %.0f us, syncs %d+%d, %v, %.0f ns", name, s, r.Ratio, r.DriverTimeUS, r.StreamSyncs, r.DeviceSyncs, r.Calls, r.NSPerEvent)
			if !r.Completed || r.PeakLive != p.PeakLive || r.PeakReserved < r.PeakLive {
				t.Errorf("%s %s: completed %v, peak live %d (trace %d), peak reserved %d", name, s, r.Completed, r.PeakLive, p.PeakLive, r.PeakReserved)
			}
		}
	}
}
