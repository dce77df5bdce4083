package main

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/fleet"
)

func TestFleetMetrics(t *testing.T) {
	ranks(t)
	rewrite := func(peak uint64) {
		t.Helper()
		s, err := fleet.Read("runs/r1" + fleet.Ending)
		if err != nil {
			t.Fatal(err)
		}
		s.UpdatedUS = time.Now().UnixMicro()
		s.Devices[0].PeakAllocated.Bytes = peak
		if err := s.Write(s.Path); err != nil {
			t.Fatal(err)
		}
	}
	rewrite(7)
	// Of the others, the summaries are too old.
	out, errs, code := cistern(t, "", "fleet", "metrics", "runs")
	if want := `cistern_rank_peak_allocated_bytes{job="7",rank="1",`; code != 0 || errs != "" || strings.Count(out, want) != 1 || strings.Contains(out, `rank="0"`) {
		t.Errorf("code %d, %s%s", code, out, errs)
	}
	for _, c := range []struct{ args, want string }{
		{"fleet metrics", "expected folders"},
		{"fleet metrics none", "none"},
		{"fleet metrics --interval 5s runs", "--interval: it is for a file"},
		{"fleet metrics --interval 5ms -o x.prom runs", "expected 1s or more"},
		{"fleet metrics --max-age 0s runs", "--max-age 0s"},
		{"fleet metrics -o none/x.prom runs", "none/x.prom: cannot be written"},
	} {
		if _, errs, code := cistern(t, "", strings.Fields(c.args)...); code != exitBad || !strings.Contains(errs, c.want) {
			t.Errorf("%s: code %d, %q", c.args, code, errs)
		}
	}
	// With an interval it follows the summaries, until it is stopped.
	if err := os.WriteFile("runs/bad"+fleet.Ending, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var stdout, stderr bytes.Buffer
	ended := make(chan int)
	go func() {
		ended <- run(ctx, []string{"fleet", "metrics", "--interval", "1s", "-o", "x.prom", "runs"}, strings.NewReader(""), &stdout, &stderr)
	}()
	for _, peak := range []string{"7", "8"} {
		found := false
		for end := time.Now().Add(time.Minute); !found && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			text, _ := os.ReadFile("x.prom")
			found = strings.Contains(string(text), `uuid=""} `+peak+"\n")
		}
		if !found {
			t.Fatalf("a peak of %s is never written", peak)
		}
		rewrite(8)
	}
	stop()
	if code := <-ended; code != 130 {
		t.Errorf("code %d", code)
	}
	// A file that cannot be read is a line, once.
	if n := strings.Count(stderr.String(), "bad.summary.json"); n != 1 || stdout.Len() > 0 {
		t.Errorf("%d lines: %s%s", n, stderr.String(), stdout.String())
	}
}
