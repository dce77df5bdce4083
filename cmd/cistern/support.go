package main

import (
	"debug/elf"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// The versions that Cistern is for. docs/versions.md has them with what happens outside; a test compares.
const (
	oldestGlibc  = "2.28"
	oldestPython = "3.9"
	oldestDriver = "12.0" // CUDA's first with cuStreamGetId, by which streams are known
	soname       = "libcistern.so.1"
)

var architectures = []string{"amd64", "arm64"}

// supportRow is one requirement on this machine.
type supportRow struct {
	What   string `json:"what"`
	Wanted string `json:"wanted"`
	Here   string `json:"here"` // empty: not found
	OK     bool   `json:"ok"`
}

// requirements are the rows without this machine; pkg is the folder of the Python package.
func requirements(pkg string) []supportRow {
	return []supportRow{
		{What: "system", Wanted: "Linux"},
		{What: "architecture", Wanted: strings.Join(architectures, " or ")},
		{What: "glibc", Wanted: oldestGlibc + " or newer"},
		{What: "Python", Wanted: oldestPython + " or newer"},
		{What: "PyTorch", Wanted: strings.Join(torchReleases(pkg), " to ")},
		{What: "PyTorch's build", Wanted: "CUDA"},
		{What: "driver", Wanted: "CUDA " + oldestDriver + " or newer, not of an older major version than PyTorch's CUDA"},
		{What: "GPU", Wanted: "virtual memory management"},
		{What: "ABI of the C library", Wanted: soname},
	}
}

// torchReleases are the first and the last minor release of PyTorch that the adapter is for, from the package's own list.
func torchReleases(pkg string) []string {
	text, err := os.ReadFile(filepath.Join(pkg, "adapter", "versions"))
	list := strings.Fields(string(text))
	if err != nil || len(list) == 0 {
		return nil
	}
	return []string{minorOf(list[0]), minorOf(list[len(list)-1])}
}

var minorVersion = regexp.MustCompile(`^(\d+)\.(\d+)`)

// minorOf is 2.11 of 2.11.0+cu130; empty for what is no version.
func minorOf(version string) string { return minorVersion.FindString(version) }

// olderThan compares two versions by their first two numbers. What is no version is older than any.
func olderThan(a, b string) bool {
	return slices.Compare(twoNumbers(a), twoNumbers(b)) < 0
}

func twoNumbers(version string) []int {
	m := minorVersion.FindStringSubmatch(version)
	if m == nil {
		return nil
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	return []int{major, minor}
}

// support fills the rows in, and adds a problem for what would not work and was not reported by then.
func (d *diagnosis) support() {
	d.Support = requirements(d.Package)
	for i := range d.Support {
		row := &d.Support[i]
		row.Here, row.OK = d.supported(row.What)
		if _, need := needs(d.Library); row.What == "glibc" && olderThan(oldestGlibc, need) {
			row.Wanted += "; this library needs " + need
		}
		switch row.What {
		case "architecture", "glibc", "driver":
			if !row.OK && row.Here != "" {
				d.problem("%s %s: %s is needed", row.What, row.Here, row.Wanted)
			}
		case "PyTorch":
			if last := torchReleases(d.Package); last != nil && olderThan(last[1], row.Here) {
				d.note("torch %s is newer than this Cistern knows: its adapter is compiled and has to pass a self-test", row.Here)
			}
		}
	}
}

// supported is what this machine has of a requirement, and whether that is enough.
func (d *diagnosis) supported(what string) (here string, ok bool) {
	switch what {
	case "system":
		return runtime.GOOS, runtime.GOOS == "linux"
	case "architecture":
		return runtime.GOARCH, slices.Contains(architectures, runtime.GOARCH)
	case "driver":
		return d.supportedDriver()
	case "GPU":
		return d.supportedDevices()
	case "ABI of the C library":
		here, _ = needs(d.Library)
		return here, here == soname
	}
	if d.Python == nil {
		return "", false
	}
	switch what {
	case "glibc":
		here = d.Python.Libc
		_, need := needs(d.Library)
		return here, here != "" && !olderThan(here, oldestGlibc) && !olderThan(here, need)
	case "Python":
		here = d.Python.Python.Version
		return here, !olderThan(here, oldestPython)
	}
	t := d.Python.Torch
	if t == nil {
		return "", false
	}
	if what == "PyTorch" {
		releases := torchReleases(d.Package)
		return t.Version, releases != nil && !olderThan(t.Version, releases[0]) && !olderThan(releases[1], t.Version)
	}
	if t.CUDA == nil {
		return "without CUDA", false
	}
	return "CUDA " + *t.CUDA, true
}

func (d *diagnosis) supportedDriver() (here string, ok bool) {
	if d.Driver == nil {
		return "", false
	}
	ok = !olderThan(d.Driver.CUDA, oldestDriver)
	if p := d.Python; p != nil && p.Torch != nil && p.Torch.CUDA != nil {
		wanted, _, _ := strings.Cut(*p.Torch.CUDA, ".")
		ok = ok && !olderThan(d.Driver.CUDA, wanted+".0")
	}
	return "CUDA " + d.Driver.CUDA, ok
}

func (d *diagnosis) supportedDevices() (here string, ok bool) {
	n := 0
	for _, v := range d.Devices {
		if v.VMM {
			n++
		}
	}
	if len(d.Devices) == 0 {
		return "", false
	}
	return fmt.Sprintf("%d of %d", n, len(d.Devices)), n == len(d.Devices)
}

// needs is the soname of a library and the newest glibc that it asks for; empty where that is not known.
func needs(library string) (name, glibc string) {
	f, err := elf.Open(library)
	if err != nil {
		return "", ""
	}
	defer f.Close()
	if names, err := f.DynString(elf.DT_SONAME); err == nil && len(names) == 1 {
		name = names[0]
	}
	symbols, _ := f.ImportedSymbols()
	for _, s := range symbols {
		if v, ok := strings.CutPrefix(s.Version, "GLIBC_"); ok && olderThan(glibc, v) {
			glibc = v
		}
	}
	return name, glibc
}

// writeSupport prints the rows as a table.
func writeSupport(w io.Writer, rows []supportRow) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "requirement\there\tsupported\twanted")
	for _, r := range rows {
		here, ok := r.Here, "no"
		if here == "" {
			here = "not found"
		}
		if r.OK {
			ok = "yes"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", r.What, oneLine(here), ok, r.Wanted)
	}
	_ = t.Flush()
}
