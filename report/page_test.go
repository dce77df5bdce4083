package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/cistern-gpu/cistern/analyze"
	"github.com/cistern-gpu/cistern/replay"
)

func TestNoBundle(t *testing.T) {
	_, err := loadBundle(fstest.MapFS{"dist/.keep": {}})
	if !errors.Is(err, ErrNoBundle) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "make build") {
		t.Errorf("got %v", err)
	}
}

// tinyPage is a page around a stand-in for the bundle.
func tinyPage(t *testing.T) string {
	t.Helper()
	b, err := loadBundle(fstest.MapFS{"dist/page.js": {Data: []byte(`run("</script>")`)},
		"dist/page.css": {Data: []byte("body{}")}, "dist/LICENSES.txt": {Data: []byte("MIT --> text")}})
	if err != nil {
		t.Fatal(err)
	}
	tr := smallTrace()
	tr.Path = `</title><script>alert(1)</script>.pickle`
	v, _ := viewOf(t, tr, []replay.Spec{{Name: "torch"}}, replay.Options{})
	var page bytes.Buffer
	if err := writePage(&page, b, []*View{v}); err != nil {
		t.Fatal(err)
	}
	return page.String()
}

// Nothing of a trace becomes markup: the page has the elements that it is made of and no others.
func TestHostileTextStaysText(t *testing.T) {
	page := tinyPage(t)
	want := []string{"html", "head", "meta", "meta", "meta", "title", "link", "style", "body", "div", "noscript", "script",
		"script", "script", "script"}
	// What scripts hold is no markup: only "</script" ends them.
	outside := regexp.MustCompile(`(?s)(<script[^>]*>).*?</script`).ReplaceAllString(page, "$1</script")
	var got []string
	for _, m := range regexp.MustCompile(`<([a-z]+)`).FindAllStringSubmatch(outside, -1) {
		got = append(got, m[1])
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("elements %v\nwant     %v", got, want)
	}
	if n := strings.Count(page, "-->"); n != 1 {
		t.Errorf("the comment of licences ends %d times", n)
	}
}

// Nothing is fetched, and only the page's own script runs, by its hash.
func TestPolicyOfThePage(t *testing.T) {
	page := tinyPage(t)
	if strings.Contains(page, "http:") || strings.Contains(page, "https:") {
		t.Error("the page names an address")
	}
	policy := regexp.MustCompile(`Content-Security-Policy" content="([^"]*)"`).FindStringSubmatch(page)
	script := regexp.MustCompile(`(?s)<script>(.*?)</script>`).FindAllStringSubmatch(page, -1)
	if policy == nil || len(script) != 1 {
		t.Fatalf("policy %v, %d scripts", policy, len(script))
	}
	got := strings.ReplaceAll(policy[1], "&#39;", "'")
	if !strings.HasPrefix(got, "default-src 'none'; script-src '"+hashSource(script[0][1])+"';") ||
		strings.Contains(got, "unsafe") {
		t.Errorf("the policy is %s", got)
	}
}

// The page's data are JSON that reads back, with every line of the chart accounted for.
func TestViewOfTrace(t *testing.T) {
	tr := smallTrace()
	v, rep := viewOf(t, tr, []replay.Spec{{Name: "torch"}, {Name: "direct"}}, replay.Options{Capacity: smallLimit})
	var kinds []string
	for _, l := range v.Lines {
		kinds = append(kinds, l.Kind)
	}
	if got := strings.Join(kinds, " "); got != "live allocated policy policy recorded" {
		t.Errorf("lines %s", got)
	}
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var back map[string]json.RawMessage
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	for _, list := range []string{"results", "ooms", "notes", "lines", "frames", "libraries",
		"frame_libraries", "call_kinds", "top_stacks", "stream_names", "pool_names"} {
		if s := string(back[list]); !strings.HasPrefix(s, "[") {
			t.Errorf("%s is %s, want a list", list, s)
		}
	}
	// Only torch dies: by itself, direct needs no piece larger than the request.
	if len(v.OOMs) != 2 || v.OOMs[0].Source != "recorded" || !strings.HasPrefix(v.OOMs[1].Source, "torch") {
		t.Errorf("failures %+v", v.OOMs)
	}
	if rep.Results[1].FailedEvent != nil {
		t.Errorf("direct died at %d", *rep.Results[1].FailedEvent)
	}
}

// A replay's curve lies on the events of its times, and keeps its peak.
func TestReservedCurve(t *testing.T) {
	tr := smallTrace()
	rep, err := replay.Replay(tr, []replay.Spec{{Name: "torch"}}, replay.Options{Samples: CurveSamples})
	if err != nil {
		t.Fatal(err)
	}
	c := reservedCurve(tr, rep.Results[0].Curve)
	if peak, _ := c.Peak(); peak != rep.Results[0].PeakReserved {
		t.Errorf("peak %d, want %d", peak, rep.Results[0].PeakReserved)
	}
	for i, at := range c.Event {
		if at < -1 || int(at) >= len(tr.Events) || i > 0 && at <= c.Event[i-1] {
			t.Fatalf("point %d is at event %d", i, at)
		}
	}
	if c.Event[0] != 1 || c.Value[0] != 20*mib {
		t.Errorf("the first point is %d at event %d, want 20 MiB at the first alloc, event 1", c.Value[0], c.Event[0])
	}
}

// A trace without events, streams or stacks has a page too.
func TestEmptyTrace(t *testing.T) {
	tr := smallTrace()
	tr.Events, tr.Notes = nil, nil
	v, _ := viewOf(t, tr, nil, replay.Options{})
	if v.Inspection.PeakLive != 0 || v.long.series == "" {
		t.Errorf("%+v", v)
	}
	if m := analyze.MapAt(tr, -1); len(m.Segments) != 0 {
		t.Errorf("%+v", m)
	}
}

func TestNumbers(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", -1234567: "-1,234,567"} {
		if got := number(n); got != want {
			t.Errorf("%d is written %s, want %s", n, got, want)
		}
	}
	for us, want := range map[float64]string{0: "0 us", 12.4: "12 us", 1500: "1.50 ms", 2.5e6: "2.50 s", 200e6: "3m20s"} {
		if got := microseconds(us); got != want {
			t.Errorf("%v us is written %s, want %s", us, got, want)
		}
	}
}

func TestWrapping(t *testing.T) {
	var b bytes.Buffer
	for width := 45; width <= 55; width++ {
		b.Reset()
		writeWrapped(&b, "  ", strings.Repeat("word ", 20)+"end", Style{Width: width})
		for line := range strings.Lines(b.String()) {
			if text := strings.TrimSuffix(line, "\n"); len(text) > width || strings.HasSuffix(text, " ") {
				t.Errorf("line of %d columns of %d: %q", len(text), width, text)
			}
		}
		if n := len(strings.Fields(b.String())); n != 21 {
			t.Errorf("%d words, want 21", n)
		}
	}
	for _, c := range [][2]string{{"one line", "one line\n"}, {"  indented, and  with blanks ", "  indented, and  with blanks\n"}, {"", "\n"},
		{"    " + strings.Repeat("x", 60) + "  y", "    " + strings.Repeat("x", 60) + "\n>>y\n"}} {
		b.Reset()
		writeWrapped(&b, ">>", c[0], Style{Width: 50})
		if b.String() != c[1] {
			t.Errorf("%q is written %q", c[0], b.String())
		}
	}
}
