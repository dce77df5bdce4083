package recording

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestCallNumbers: the audit library and this package number the driver's functions alike.
func TestCallNumbers(t *testing.T) {
	header, err := os.ReadFile("../audit/audit.h")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?s)enum call \{\s*CALL_NONE,(.*?)\}`).FindSubmatch(header)
	if m == nil {
		t.Fatal("audit.h has no enum call")
	}
	var names []string
	for _, name := range strings.Split(string(m[1]), ",") {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, "cu"+strings.ToLower(strings.ReplaceAll(name, "_", "")))
		}
	}
	var want []string
	for k := CallNone + 1; k < NumCallKinds; k++ {
		want = append(want, strings.ToLower(k.String()))
	}
	if !slices.Equal(names, want) {
		t.Errorf("audit.h has %v\nwant %v", names, want)
	}
}
