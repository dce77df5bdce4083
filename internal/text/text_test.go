package text

import "testing"

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"":                          "",
		"forward pass ~":            "forward pass ~",
		"größe 計算 🙂":                "größe 計算 🙂",
		"a\xffb":                    "a\ufffdb",
		"\xc3\x28":                  "\ufffd(",
		"a\tb\r\nc":                 "a\ufffdb\ufffd\ufffdc",
		"\x1b[31mred\x07\x00\x7f":   "\ufffd[31mred\ufffd\ufffd\ufffd",
		"\u009b31m":                 "\ufffd31m",
		"line\u2028end\u2029\u0085": "line\ufffdend\ufffd\ufffd",
		"abc\u202egpj":              "abc\ufffdgpj",
		"\u2066x\u2069":             "\ufffdx\ufffd",
		"می\u200cخواهم":             "می\u200cخواهم", // without a joiner the word would be another
	} {
		if got := Clean(in); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
		if again := Clean(Clean(in)); again != Clean(in) {
			t.Errorf("%q cleaned twice is %q", in, again)
		}
	}
}
