package recording

import (
	"strings"
	"testing"
)

func TestEnvironmentText(t *testing.T) {
	for in, want := range map[string]string{
		"2.11.0+cu130":                     "2.11.0+cu130",
		"a\nb\x1b[31m":                     "a\ufffdb\ufffd[31m",
		strings.Repeat("x", 4<<20):         strings.Repeat("x", 256),
		strings.Repeat("\xff", 300):        strings.Repeat("\ufffd", 85),
		strings.Repeat("x", 255) + "größe": strings.Repeat("x", 255) + "g",
	} {
		got := EnvironmentText(in)
		if got != want {
			t.Errorf("%.20q became %.20q of %d bytes, want %.20q of %d", in, got, len(got), want, len(want))
		}
		if again := EnvironmentText(got); again != got {
			t.Errorf("%.20q became %.20q the second time", got, again)
		}
	}
}

func TestEnvironmentString(t *testing.T) {
	for want, e := range map[string]Environment{
		"": {},
		"PyTorch 2.11.0+cu130, CUDA 13.0, driver 580.65.06, NVIDIA H100 80GB HBM3, 79.18 GiB of memory": {"2.11.0+cu130", "13.0", "580.65.06",
			"NVIDIA H100 80GB HBM3", 85017493504},
		"PyTorch 2.9.1": {PyTorch: "2.9.1"},
	} {
		if got := e.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
