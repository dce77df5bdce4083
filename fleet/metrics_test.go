package fleet

import (
	"strings"
	"testing"
	"time"
)

func TestMetrics(t *testing.T) {
	s := sample()
	s.Ended = EndNone
	s.UpdatedUS = 1_500_000
	s.Host = "n\"1\\"
	old := sample()
	old.Ended, old.UpdatedUS = EndNone, 400_000
	idle := sample()
	idle.Ended, idle.Variables = EndNone, nil
	idle.UpdatedUS = 2_000_000
	idle.Devices = []Device{{Ordinal: 3}}
	ended := sample()
	ended.UpdatedUS = 2_000_000
	f := &Folder{Summaries: []*Summary{s, old, ended, idle}}
	var b strings.Builder
	if err := f.WriteMetrics(&b, time.UnixMicro(1_000_000)); err != nil {
		t.Fatal(err)
	}
	const labels = `{job="77",rank="3",restart="0",node="n\"1\\",pid="4711",device="0",uuid="GPU-1"}`
	const none = `{job="",rank="",restart="0",node="n1",pid="4711",device="3",uuid=""}`
	for _, want := range []string{
		"# HELP cistern_rank_allocated_bytes Allocated by the program at the end of its last step.\n# TYPE cistern_rank_allocated_bytes gauge\n" +
			"cistern_rank_allocated_bytes" + labels + " 1\n# HELP",
		"cistern_rank_reserved_bytes" + labels + " 3\n# HELP",
		"cistern_rank_limit_bytes" + labels + " 1\n# HELP",
		"# TYPE cistern_rank_peak_allocated_bytes gauge\ncistern_rank_peak_allocated_bytes" + labels + " 5\ncistern_rank_peak_allocated_bytes" + none + " 0\n",
		"# TYPE cistern_rank_ooms_total counter\ncistern_rank_ooms_total" + labels + " 1\n",
		"cistern_rank_updated_seconds" + labels + " 1.5\ncistern_rank_updated_seconds" + none + " 2\n",
		"cistern_rank_total_bytes" + labels + " 85899345920\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
	b.Reset()
	if err := f.WriteMetrics(&b, time.UnixMicro(3_000_000)); err != nil || b.Len() != 0 {
		t.Errorf("%v, %q", err, b.String())
	}
}

// Of two summaries of one process, as where a program became another one, the newest counts: Prometheus refuses both.
func TestMetricsOnce(t *testing.T) {
	older, newer := sample(), sample()
	older.Ended, newer.Ended, newer.UpdatedUS = EndNone, EndNone, older.UpdatedUS+1
	newer.Devices[0].PeakAllocated.Bytes = 4711
	for _, list := range [][]*Summary{{older, newer}, {newer, older}} {
		var b strings.Builder
		if err := (&Folder{Summaries: list}).WriteMetrics(&b, time.UnixMicro(0)); err != nil {
			t.Fatal(err)
		}
		if out := b.String(); strings.Count(out, "cistern_rank_peak_allocated_bytes{") != 1 || !strings.Contains(out, "} 4711\n") {
			t.Error(out)
		}
	}
}
