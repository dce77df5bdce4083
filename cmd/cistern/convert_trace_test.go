//go:build linux && amd64

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What cistern trace writes can be converted into everything; the table of calls has each of them.
func TestConvertTraced(t *testing.T) {
	x := newTraced(t)
	d, _, stderr, code := x.run(nil, "--stacks", "native", "--", x.program, "dlsym", "everything")
	if code != 0 || len(d.Calls) == 0 {
		t.Fatalf("code %d, %d calls\n%s", code, len(d.Calls), stderr)
	}
	file := filepath.Join(x.dir, "run.cistern")
	for _, to := range formatNames() {
		if _, errs, code := cistern(t, "", "convert", file, "-o", filepath.Join(x.dir, "out."+to), "--to", to); code != exitOK {
			t.Errorf("%s: code %d, %s", to, code, errs)
		}
	}
	if _, errs, code := cistern(t, "", "convert", "--device", "0", file, "-o", "-", "--to", "csv"); code != exitBad ||
		!strings.Contains(errs, "converted for all devices together") {
		t.Errorf("--device: code %d, %q", code, errs)
	}
	out, errs, code := cistern(t, "", "convert", file, "-o", "-", "--to", "csv", "--table", "calls")
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if code != exitOK || len(lines) != 1+len(d.Calls) {
		t.Fatalf("code %d, %d lines for %d calls: %s", code, len(lines), len(d.Calls), errs)
	}
	for i := range d.Calls {
		if !strings.Contains(lines[i+1], ","+d.Calls[i].Kind.String()+",") || !strings.Contains(lines[i+1], "everything ") {
			t.Errorf("call %d, %s, is the line %s", i, d.Calls[i].Kind, lines[i+1])
		}
	}
	if b, err := os.ReadFile(filepath.Join(x.dir, "out.perfetto")); err != nil || !strings.Contains(string(b), "cuMemAlloc") {
		t.Errorf("%v: no call on the timeline of %d bytes", err, len(b))
	}
}
