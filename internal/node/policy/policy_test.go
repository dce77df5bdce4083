package policy

import (
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/internal/node/ledger"
)

const gib = 1 << 30

const sample = `# A node.
[rule]
weight = 2

[rule]
cgroup = /system.slice/serving.service/
min = 20GiB
high=30GiB
priority = 10

; by hand
[rule]
user = 1000
label = train*
device = GPU-0a0b
max = 10 GiB
weight = 1
`

func TestOf(t *testing.T) {
	p, err := Parse(strings.NewReader(sample))
	if err != nil || p.Len() != 3 {
		t.Fatal(p, err)
	}
	serving := ledger.Policy{Weight: 2, Min: 20 * gib, High: 30 * gib, Priority: 10}
	for _, c := range []struct {
		client Client
		want   ledger.Policy
	}{
		{Client{}, ledger.Policy{Weight: 2}},
		{Client{Cgroup: "/system.slice/serving.service"}, serving},
		{Client{Cgroup: "/system.slice/serving.service/worker-3"}, serving},
		{Client{Cgroup: "/system.slice/serving.service2"}, ledger.Policy{Weight: 2}},
		{Client{Cgroup: "/system.slice"}, ledger.Policy{Weight: 2}},
		{Client{UID: 1000, Label: "trainer/1", Device: "0A0B0c"}, ledger.Policy{Weight: 1, Max: 10 * gib}},
		{Client{UID: 1000, Label: "trainer", Device: "0b0b0c"}, ledger.Policy{Weight: 2}},
		{Client{UID: 1000, Label: "a trainer", Device: "0a0b"}, ledger.Policy{Weight: 2}},
		{Client{UID: 1001, Label: "trainer", Device: "0a0b"}, ledger.Policy{Weight: 2}},
	} {
		if got := p.Of(c.client); got != c.want {
			t.Errorf("%+v: %+v, want %+v", c.client, got, c.want)
		}
	}
	if got := (&Policy{}).Of(Client{}); got != (ledger.Policy{Weight: 1}) {
		t.Errorf("without rules: %+v", got)
	}
}

func TestWith(t *testing.T) {
	p, err := Parse(strings.NewReader(sample))
	if err != nil {
		t.Fatal(err)
	}
	r, err := ParseRule("user=root max=1GiB")
	if err != nil || r.String() != "user=root max=1GiB" {
		t.Fatal(r.String(), err)
	}
	q := p.With([]Rule{r})
	if got := q.Of(Client{UID: 0}); got.Max != gib || p.Of(Client{UID: 0}).Max != 0 || q.Len() != p.Len()+1 {
		t.Errorf("%+v", got)
	}
}

func TestErrors(t *testing.T) {
	for text, want := range map[string]string{
		"min = 1GiB":                                `line 1: "min = 1GiB": expected [rule] before the first key`,
		"\n[client]":                                `line 2: section "[client]": expected [rule]`,
		"[rule]\nmin 1GiB":                          `line 2: "min 1GiB": expected key = value`,
		"[rule]\nmin =":                             "line 2: min: expected a value",
		"[rule]\nmin = much":                        "line 2: min = much: ",
		"[rule]\nminn = 1":                          `line 2: unknown key "minn": did you mean min?`,
		"[rule]\nxyzzy = 1":                         `line 2: unknown key "xyzzy": the keys are user, cgroup,`,
		"[rule]\nweight = 0":                        "line 2: weight = 0: expected a number from 1",
		"[rule]\npriority = high":                   "line 2: priority = high: expected a number",
		"[rule]\ndecay = 1s":                        "line 2: decay = 1s: expected a time from 5s to 24h0m0s, or 0s",
		"[rule]\nuser = no-such-user-at-all":        "line 2: user = no-such-user-at-all: there is no such user",
		"[rule]\nlabel = [":                         `line 2: "[": expected a pattern`,
		"[rule]\ncgroup = system.slice":             "line 2: cgroup = system.slice: expected a path",
		"\n[rule]\nuser = 0\n[rule]\nweight=1":      "line 2: the rule that begins here: it sets nothing",
		"[rule]\nmin = 2GiB\nmax = 1GiB":            "line 1: the rule that begins here: min is 2.00 GiB, above max, which is 1.00 GiB",
		"[rule]\nhigh = 2GiB\nmax = 1GiB":           "high is 2.00 GiB, above max",
		"[rule]\n" + strings.Repeat("x", 1<<17):     "line 2: ",
		strings.Repeat("[rule]\nweight=1\n", 1e4+1): "expected at most 10000 rules",
	} {
		_, err := Parse(strings.NewReader(text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
	for _, text := range []string{"", "user=0", "min", "min=1GiB x=2"} {
		if _, err := ParseRule(text); err == nil {
			t.Errorf("%q is a rule", text)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(sample)
	f.Add("[rule]\nuser=0\nmin=1\n")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse(strings.NewReader(text))
		if (p == nil) == (err == nil) {
			t.Fatal(p, err)
		}
		if err == nil {
			p.Of(Client{Cgroup: "/a", Label: text, Name: text, Device: text})
		}
	})
}

// A rule takes the place of one with the same conditions and keys, in whatever order they are written.
func TestReplaces(t *testing.T) {
	rule := func(text string) Rule {
		r, err := ParseRule(text)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := rule("label=a user=0 min=1GiB weight=2")
	for text, want := range map[string]bool{
		"user=0 label=a weight=9 min=5GiB":         true,
		"label=a user=0 min=1GiB":                  false,
		"label=a user=0 min=1GiB weight=2 max=0":   false,
		"label=b user=0 min=1GiB weight=2":         false,
		"label=a min=1GiB weight=2":                false,
		"label=a label=a user=0 min=1GiB weight=3": true,
	} {
		if o := rule(text); r.Replaces(&o) != want || o.Replaces(&r) != want {
			t.Errorf("%s: want %v", text, want)
		}
	}
}
