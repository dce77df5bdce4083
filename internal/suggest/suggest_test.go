package suggest

import "testing"

func TestQuestion(t *testing.T) {
	commands := []string{"convert", "diff", "doctor", "inspect", "record", "replay", "report", "run", "top", "trace", "tune"}
	keys := []string{"max_split_size_mb", "max_non_split_rounding_mb", "limit", "chunk"}
	for _, c := range []struct {
		word  string
		names []string
		want  string
	}{
		{"reply", commands, "did you mean replay?"},
		{"recrod", commands, "did you mean record?"},
		{"Replay", commands, "did you mean replay?"},
		{"reprot", commands, "did you mean report?"},
		{"tun", commands, "did you mean run or tune?"},
		{"insp", commands, "did you mean inspect?"},
		{"max_split", keys, "did you mean max_split_size_mb?"},
		{"chunks", keys, "did you mean chunk?"},
		{"xyz", commands, ""},
		{"x", commands, ""},
		{"", commands, ""},
		{"ta", []string{"a", "b", "ta!"}, "did you mean ta!?"},
	} {
		if got := Question(c.word, "", c.names); got != c.want {
			t.Errorf("%q: %q, want %q", c.word, got, c.want)
		}
	}
	if got, want := Question("polcy", "--", []string{"policy", "html"}), "did you mean --policy?"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
