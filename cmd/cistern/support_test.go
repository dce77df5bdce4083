package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestVersionsPage: docs/versions.md has the requirements that doctor compares with the machine, in the same words.
func TestVersionsPage(t *testing.T) {
	root := filepath.Join("..", "..")
	text, err := os.ReadFile(filepath.Join(root, "docs", "versions.md"))
	if err != nil {
		t.Fatal(err)
	}
	var listed [][2]string
	for _, line := range strings.Split(string(text), "\n") {
		if cells := strings.Split(line, "|"); len(cells) == 5 && !strings.Contains(line, "---") {
			listed = append(listed, [2]string{strings.TrimSpace(cells[1]), strings.ReplaceAll(strings.TrimSpace(cells[2]), "`", "")})
		}
	}
	rows := requirements(filepath.Join(root, "python", "cistern"))
	if len(listed) != len(rows)+1 {
		t.Fatalf("the page lists %q, doctor %d requirements", listed, len(rows))
	}
	for i, r := range rows {
		if r.Wanted == "" || listed[i+1] != [2]string{r.What, r.Wanted} {
			t.Errorf("the page has %q, doctor %q: %q", listed[i+1], r.What, r.Wanted)
		}
	}
	for file, number := range map[string]string{"python/pyproject.toml": `requires-python = ">=` + oldestPython + `"`, "Makefile": "SONAME := " + soname} {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil || !strings.Contains(string(text), number) {
			t.Errorf("%s lacks %q, %v", file, number, err)
		}
	}
}

// machine is a diagnosis where all is as it should be, with changes to what Python says.
func machine(t *testing.T, python string) *diagnosis {
	d := &diagnosis{Package: filepath.Join("..", "..", "python", "cistern"), Driver: &driverDiagnosis{CUDA: "13.0"},
		Devices: []deviceDiagnosis{{VMM: true}, {VMM: true}}, Python: new(pythonReport)}
	for _, text := range []string{`{"libc": "2.28", "python": {"version": "3.9.1"}, "torch": {"version": "2.11.0+cu130", "cuda": "13.2"}}`, python} {
		if err := json.Unmarshal([]byte(text), d.Python); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func TestSupport(t *testing.T) {
	for _, c := range []struct {
		name, python, no, problem, note string
		change                          func(*diagnosis)
	}{
		{name: "all is well", python: `{}`},
		{name: "glibc", python: `{"libc": "2.27"}`, no: "glibc 2.27", problem: "glibc 2.27: 2.28 or newer is needed"},
		{name: "musl", python: `{"libc": ""}`, no: "glibc "},
		{name: "Python", python: `{"python": {"version": "3.8.19"}}`, no: "Python 3.8.19"},
		{name: "old PyTorch", python: `{"torch": {"version": "2.5.1+cu124"}}`, no: "PyTorch 2.5.1+cu124"},
		{name: "new PyTorch", python: `{"torch": {"version": "2.99.0.dev1"}}`, no: "PyTorch 2.99.0.dev1", note: "torch 2.99.0.dev1 is newer"},
		{name: "no PyTorch", python: `{"torch": null}`, no: "PyTorch , PyTorch's build "},
		{name: "ROCm", python: `{"torch": {"cuda": null}}`, no: "PyTorch's build without CUDA"},
		{name: "an older PyTorch's driver", python: `{"torch": {"cuda": "12.4"}}`, change: func(d *diagnosis) { d.Driver.CUDA = "12.2" }},
		{name: "the driver's major version", python: `{}`, no: "driver CUDA 12.9", problem: "driver CUDA 12.9: CUDA 12.0 or newer, ",
			change: func(d *diagnosis) { d.Driver.CUDA = "12.9" }},
		{name: "the oldest driver", python: `{"torch": null}`, no: "PyTorch , PyTorch's build , driver CUDA 11.8", problem: "driver CUDA 11.8: ",
			change: func(d *diagnosis) { d.Driver.CUDA = "11.8" }},
		{name: "no driver", python: `{}`, no: "driver , GPU ", change: func(d *diagnosis) { d.Driver, d.Devices = nil, nil }},
		{name: "a device", python: `{}`, no: "GPU 1 of 2", change: func(d *diagnosis) { d.Devices[1].VMM = false }},
	} {
		d := machine(t, c.python)
		if c.change != nil {
			c.change(d)
		}
		d.support()
		var no []string
		for _, r := range d.Support {
			// The machine of the test may be another, and there is no library.
			if !r.OK && r.What != "ABI of the C library" && r.What != "system" && r.What != "architecture" {
				no = append(no, r.What+" "+r.Here)
			}
		}
		if got := strings.Join(no, ", "); got != c.no {
			t.Errorf("%s: no for %q, want %q", c.name, got, c.no)
		}
		for _, m := range []struct {
			list []string
			want string
		}{{d.Problems, c.problem}, {d.Notes, c.note}} {
			if text := strings.Join(m.list, "\n"); (m.want == "") != (text == "") || !strings.Contains(text, m.want) || len(m.list) > 1 {
				t.Errorf("%s: %q, want %q", c.name, m.list, m.want)
			}
		}
		var out strings.Builder
		writeSupport(&out, d.Support)
		if n := len(regexp.MustCompile(`(?m)  no  `).FindAllString(out.String(), -1)); n < len(no) || strings.Count(out.String(), "\n") != 10 {
			t.Errorf("%s:\n%s", c.name, &out)
		}
	}
}

// TestLibraryNeeds: the soname and the version of glibc are those of the file.
func TestLibraryNeeds(t *testing.T) {
	library := filepath.Join("..", "..", "lib", soname)
	if _, err := os.Stat(library); err != nil {
		t.Skip("make library has not run")
	}
	name, glibc := needs(library)
	if name != soname || olderThan(glibc, "2.2") || olderThan("2.99", glibc) {
		t.Errorf("%q, glibc %q", name, glibc)
	}
	if name, glibc = needs(os.DevNull); name != "" || glibc != "" {
		t.Errorf("of no library: %q, %q", name, glibc)
	}
}
