package main

import (
	"bytes"
	"strings"
	"testing"

	_ "github.com/cistern-gpu/cistern/internal/lockrank/checked"
)

func TestRun(t *testing.T) {
	for _, c := range []struct {
		args      string
		code      int
		out, errs string
	}{
		{"", 2, "", "usage: lab COMMAND"},
		{"sock", 2, "", "usage: lab COMMAND"},
		{"soak -ops 1", 2, "", "lab soak: usage: -ops is at least 1000"},
		{"query -no", 2, "", "lab query: usage: flag provided but not defined: -no"},
		{"replay -driver sim", 2, "", "lab replay: usage: no traces are named"},
		{"replay -driver sim nowhere", 1, "", "lab replay: nowhere: "},
		{"devices -driver sim", 1, "", "lab devices: two devices are needed, there are 1"},
		{"probe -driver sim", 1, "", "lab probe: driver sim runs no kernels"},
		{"pools -ops 1", 2, "", "lab pools: usage: -ops is at least 2"},
		{"pause -h", 0, "-cycles", ""},
		{"pause -driver sim:2GiB -size 8MiB -disk 0 -cycles 3 -repeat 1 -rounds 1", 0, "driver calls", ""},
	} {
		var out, errs bytes.Buffer
		code := run(strings.Fields(c.args), &out, &errs)
		if code != c.code || !strings.Contains(out.String(), c.out) || !strings.HasPrefix(errs.String(), c.errs) || c.errs == "" && errs.Len() > 0 {
			t.Errorf("lab %s: status %d\n%s%s", c.args, code, out.String(), errs.String())
		}
	}
}
