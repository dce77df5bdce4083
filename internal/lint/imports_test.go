package lint

import (
	"bytes"
	"encoding/json"
	"slices"
	"sort"
	"strings"
	"testing"
)

// mayImport says for every package which others of the house it may import, outside its tests. What is not there is
// forbidden: the engine never learns which driver it runs on, replay never looks inside the engine, and nothing knows
// who calls it.
var mayImport = map[string][]string{
	// The engine, and below it.
	".":                        {"cuda", "event", "internal/engine/health", "internal/engine/quota", "internal/engine/timeline", "internal/front", "internal/heap", "internal/lockrank", "internal/nopoll", "internal/stacks", "internal/units", "internal/vm", "resource"},
	"internal/engine/quota":    {"internal/front"},
	"internal/engine/timeline": {"cuda", "internal/engine/health", "internal/front", "internal/lockrank"},
	"internal/engine/health":   {"cuda", "internal/front", "internal/lockrank"},
	"internal/front":           {},
	"internal/front/model":     {},
	"internal/heap":            {},
	"internal/stacks":          {},
	// The order of locks; on where tests import checked.
	"internal/lockrank":         {},
	"internal/lockrank/checked": {"internal/lockrank"},
	"internal/vm":               {"cuda"},
	"resource":                  {"cuda", "internal/lockrank", "internal/nopoll"},
	// Resources that need more than the driver, resources by name, and the suite that every resource passes.
	"resource/nccl":         {"cuda", "internal/environ", "internal/nopoll", "resource"},
	"resource/open":         {"cuda", "internal/nopoll", "internal/units", "resource", "resource/nccl"},
	"resource/resourcetest": {"cuda", "cuda/sim", "internal/gpu", "resource"},
	"event":                 {},
	// The driver. Only cuda/open knows both.
	"cuda":                {},
	"cuda/nvidia":         {"cuda"},
	"cuda/nvidia/standin": {"internal/standin"},
	"cuda/sim":            {"cuda"},
	"cuda/open":           {"cuda", "cuda/nvidia", "cuda/sim", "internal/units"},
	// Recorded runs.
	"trace":   {"event", "internal/leaves", "internal/symbols", "internal/text"},
	"export":  {"event", "trace"},
	"replay":  {".", "cuda", "cuda/sim", "event", "internal/leaves", "internal/units", "trace"},
	"analyze": {"event", "internal/leaves", "internal/units", "replay", "trace"},
	"report":  {"analyze", "event", "internal/units", "replay", "trace"},
	// Shared by all: sizes in words, the processor's time.
	"internal/leaves":  {},
	"internal/units":   {},
	"internal/cputime": {},
	// Above the engine: memory passed between processes.
	"internal/share": {".", "cuda", "internal/environ", "internal/nopoll"},
	// What the audit library says of a program that is traced.
	"internal/audit": {"internal/cputime"},
	// What a process shows of what it holds.
	"internal/live": {},
	// Names of functions.
	"internal/symbols": {"internal/nopoll"},
	// Files without the poller of Go's runtime.
	"internal/nopoll": {"internal/environ"},
	// Environment variables.
	"internal/environ":            {},
	"internal/environ/setuidtest": {},
	// Text that comes from elsewhere, made harmless.
	"internal/text": {},
	// Files that are written whole or not at all.
	"internal/outfile": {"internal/nopoll"},
	// Room for signal handlers on the stacks of goroutines.
	"internal/stackroom": {},
	// What an allocator holds, written to a file.
	"dump": {".", "cuda", "event", "internal/environ", "internal/front", "internal/nopoll", "internal/nvml", "internal/outfile", "internal/text", "internal/units", "trace"},
	// What NVIDIA's management library says of a machine.
	"internal/nvml":         {},
	"internal/nvml/standin": {"internal/standin"},
	// What cistern top knows: both of these, put together.
	"internal/top": {"internal/live", "internal/nvml"},
	// For tests and commands on a GPU: kernels.
	"internal/gpu": {"cuda", "cuda/nvidia"},
	// Tests only.
	"internal/examples": {},
	"internal/rerun":    {},
	"internal/standin":  {},
	"internal/lint":     {},
}

// commands may import everything but each other.
const commands = "cmd/"

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		name := p.short()
		allowed, known := mayImport[name]
		if !known && !strings.HasPrefix(name, commands) {
			t.Errorf("%s: not in the table of who may import whom; see ARCHITECTURE.md for where a package belongs", name)
			continue
		}
		for _, i := range p.Imports {
			i, ours := house(i)
			if !ours {
				continue
			}
			if strings.HasPrefix(i, commands) || known && !slices.Contains(allowed, i) {
				t.Errorf("%s imports %s; it may import %v", name, i, allowed)
			}
		}
	}
}

// Tests reach further, but an engine whose tests look into replay, or drivers whose tests know the engine, could not be
// taken apart any more.
func TestImportsOfTests(t *testing.T) {
	never := map[string][]string{
		".":             {"trace", "replay", "analyze", "report"},
		"internal/heap": {".", "cuda/sim", "cuda/nvidia", "replay"},
		"internal/vm":   {".", "replay"},
		"cuda/sim":      {".", "cuda/nvidia", "replay", "trace"},
		"cuda/nvidia":   {".", "cuda/sim", "replay", "trace"},
		"trace":         {".", "replay", "analyze", "report"},
		"export":        {".", "replay", "report"},
		"replay":        {"internal/heap", "internal/vm", "report", "analyze"},
		"analyze":       {"report"},
	}
	for _, p := range packages(t) {
		for _, i := range append(p.TestImports, p.XTestImports...) {
			if i, ours := house(i); ours && slices.Contains(never[p.short()], i) {
				t.Errorf("a test of %s imports %s", p.short(), i)
			}
		}
	}
}

// TestLocksAreChecked: a test that runs the engine checks the order of its locks.
func TestLocksAreChecked(t *testing.T) {
	const checked = module + "/internal/lockrank/checked"
	tests := 0
	for d := json.NewDecoder(bytes.NewReader(goCommand(t, "list", "-test", "-json=ImportPath,Deps", "./..."))); d.More(); {
		var p struct {
			ImportPath string
			Deps       []string
		}
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		name, test := strings.CutSuffix(p.ImportPath, ".test")
		for i, dep := range p.Deps {
			p.Deps[i], _, _ = strings.Cut(dep, " ") // of a package that is built anew for this test
		}
		if !test || !slices.Contains(p.Deps, module) {
			continue
		}
		tests++
		if !slices.Contains(p.Deps, checked) {
			t.Errorf("the tests of %s run the engine and do not import %s", name, checked)
		}
	}
	if tests < 10 {
		t.Errorf("%d tests run the engine: this one no longer finds them", tests)
	}
}

// TestEngineStandsAlone: a program that imports the engine gets Go's standard library with it and nothing else, and no
// network code.
func TestEngineStandsAlone(t *testing.T) {
	for _, name := range []string{"", "/cuda/open"} {
		deps := strings.Fields(string(goCommand(t, "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", module+name)))
		for _, d := range deps {
			if _, ours := house(d); !ours {
				t.Errorf("%s needs %s", module+name, d)
			}
		}
		std := strings.Fields(string(goCommand(t, "list", "-deps", module+name)))
		if slices.Contains(std, "net") || slices.Contains(std, "net/http") {
			t.Errorf("%s brings in package net", module+name)
		}
	}
}

// TestTableIsTrue: what the table allows exists.
func TestTableIsTrue(t *testing.T) {
	var names []string
	for _, p := range packages(t) {
		names = append(names, p.short())
	}
	check := func(name string) {
		if !slices.Contains(names, name) {
			t.Errorf("the table of imports names %s, which does not exist", name)
		}
	}
	for name, allowed := range mayImport {
		check(name)
		for _, a := range allowed {
			check(a)
		}
		if !sort.StringsAreSorted(allowed) {
			t.Errorf("%s: sort %v", name, allowed)
		}
	}
}

// house is a package of the module by its folder.
func house(path string) (name string, ours bool) {
	if path == module {
		return ".", true
	}
	return strings.CutPrefix(path, module+"/")
}
