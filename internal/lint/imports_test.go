package lint

import (
	"bytes"
	"encoding/json"
	"slices"
	"sort"
	"strings"
	"testing"
)

// mayImport says for every package which others of the module it may import, outside its tests. What is not there is
// forbidden: the engine never learns which driver it runs on, replay never looks inside the engine, and no package knows
// its callers.
var mayImport = map[string][]string{
	// The engine, and below it.
	".":                        {"config", "cuda", "event", "internal/engine", "memory", "resource", "resource/open"},
	"internal/engine":          {"config", "cuda", "event", "internal/deadline", "internal/engine/arena", "internal/engine/health", "internal/engine/journal", "internal/engine/offload", "internal/engine/phys", "internal/engine/quota", "internal/engine/timeline", "internal/engine/views", "internal/heap", "internal/latency", "internal/lockrank", "internal/magazine", "internal/nopoll", "internal/stacks", "internal/units", "memory", "resource"},
	"internal/engine/arena":    {"cuda", "internal/engine/health", "internal/engine/quota", "internal/engine/timeline", "internal/heap", "internal/lockrank", "internal/magazine"},
	"internal/engine/phys":     {"cuda", "internal/engine/health", "internal/engine/quota"},
	"memory":                   {"cuda", "event", "internal/units"},
	"config":                   {"internal/suggest", "internal/units", "memory", "resource"},
	"internal/engine/journal":  {"event", "internal/engine/health", "internal/lockrank", "internal/stacks", "memory"},
	"internal/engine/offload":  {"cuda", "internal/engine/health", "internal/engine/timeline", "internal/nopoll", "internal/units"},
	"internal/engine/quota":    {"internal/magazine"},
	"internal/engine/views":    {"internal/engine/journal", "internal/engine/quota", "internal/heap", "internal/units", "memory"},
	"internal/engine/timeline": {"cuda", "internal/engine/health", "internal/lockrank", "internal/magazine"},
	"internal/engine/health":   {"cuda", "internal/lockrank", "internal/magazine"},
	"internal/magazine":        {"internal/deadline"},
	"internal/magazine/model":  {},
	"internal/heap":            {},
	"internal/stacks":          {},
	// The order of locks; on where tests import checked.
	"internal/lockrank":         {},
	"internal/lockrank/checked": {"internal/lockrank"},
	"resource":                  {"cuda", "internal/lockrank", "internal/nopoll"},
	// Resources that need more than the driver, resources by name, and the suite that every resource passes.
	"resource/nccl":         {"cuda", "internal/environ", "internal/nopoll", "resource"},
	"resource/open":         {"cuda", "internal/nopoll", "internal/units", "resource", "resource/external", "resource/nccl"},
	"resource/external":     {"cuda", "resource"},
	"resource/resourcetest": {"cuda", "cuda/sim", "internal/gpu", "resource"},
	"event":                 {},
	// The driver. Only cuda/open knows both.
	"cuda":                {},
	"cuda/nvidia":         {"cuda"},
	"cuda/nvidia/standin": {"internal/standin"},
	"cuda/sim":            {"cuda"},
	"cuda/open":           {"cuda", "cuda/nvidia", "cuda/sim", "internal/units"},
	// Recorded runs.
	"recording":                        {"event"},
	"recording/driver":                 {"event", "internal/leaves", "recording", "recording/internal/tables", "recording/native"},
	"recording/identity":               {"internal/text", "recording"},
	"recording/initial":                {"event", "recording", "recording/internal/segments"},
	"recording/internal/input":         {"recording"},
	"recording/internal/segments":      {"event", "internal/leaves", "recording"},
	"recording/internal/tables":        {"event", "internal/symbols", "internal/text", "recording", "recording/internal/input"},
	"recording/native":                 {"event", "internal/text", "recording", "recording/internal/input", "recording/internal/segments", "recording/internal/tables"},
	"recording/open":                   {"recording", "recording/internal/input", "recording/native", "recording/pytorch", "recording/rmm"},
	"recording/pytorch":                {"event", "internal/text", "recording", "recording/identity", "recording/initial", "recording/internal/input", "recording/internal/segments", "recording/internal/tables"},
	"recording/rmm":                    {"event", "recording", "recording/initial", "recording/internal/input", "recording/internal/tables"},
	"recording/internal/recordingtest": {"event", "internal/cputime", "recording", "recording/driver", "recording/internal/input", "recording/internal/segments", "recording/internal/tables", "recording/native", "recording/open", "recording/pytorch"},
	"export":                           {"event", "recording"},
	"replay":                           {".", "cuda", "cuda/sim", "event", "internal/leaves", "internal/suggest", "internal/units", "recording"},
	"analyze":                          {"event", "internal/leaves", "internal/units", "recording", "recording/driver", "replay"},
	"report":                           {"analyze", "event", "fleet", "internal/units", "recording", "replay"},
	// Many recordings: jobs, ranks.
	"fleet":           {"analyze", "event", "internal/outfile", "internal/text", "internal/units", "recording", "recording/identity", "recording/open"},
	"fleet/fleettest": {"fleet", "recording"},
	"fleet/dataset":   {"export", "fleet", "internal/outfile", "recording"},
	// Shared by all: sizes in words, CPU time, waits with an end.
	"internal/deadline": {},
	"internal/latency":  {},
	"internal/leaves":   {},
	"internal/units":    {},
	"internal/suggest":  {},
	"internal/cputime":  {},
	// Above the engine: memory passed between processes.
	"internal/share": {"cuda", "internal/deadline", "internal/engine", "internal/environ", "internal/nopoll", "internal/socket", "memory"},
	// Sockets without the poller of Go's runtime.
	"internal/socket": {},
	"node": {".", "config", "cuda", "internal/live", "internal/node/attach", "internal/node/client", "internal/node/host", "internal/node/objects",
		"internal/node/protocol", "memory"},
	// The broker of a node: what it says, what it knows and decides, the daemon, and a process's end of it.
	"internal/node/protocol": {"internal/text"},
	"internal/node/grants":   {},
	"internal/node/ledger":   {"internal/node/protocol", "internal/units"},
	"internal/node/policy":   {"internal/node/ledger", "internal/suggest", "internal/units"},
	"internal/node/broker": {"cuda", "internal/live", "internal/node/grants", "internal/node/ledger", "internal/node/objects", "internal/node/policy", "internal/node/protocol", "internal/text",
		"internal/units"},
	"internal/node/objects": {"cuda", "internal/node/protocol", "internal/units"},
	"internal/node/attach":  {"cuda", "internal/deadline", "internal/node/client", "internal/node/objects", "internal/node/protocol", "memory"},
	"internal/node/control": {"internal/node/protocol"},
	"internal/node/metrics": {"internal/node/protocol"},
	"internal/node/client":  {"cuda", "internal/deadline", "internal/environ", "internal/live", "internal/node/grants", "internal/node/objects", "internal/node/protocol", "internal/socket"},
	"internal/node/host":    {"cuda", "internal/live", "internal/node/client", "internal/node/protocol", "memory"},
	// What the audit library says of a program that is traced.
	"internal/audit": {"internal/cputime", "internal/deadline"},
	// What a process shows of what it holds.
	"internal/live": {"internal/deadline", "internal/latency"},
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
	// Space for signal handlers on the stacks of goroutines.
	"internal/stackspace": {},
	// What an allocator holds, written to a file.
	"dump": {".", "config", "cuda", "event", "internal/deadline", "internal/environ", "internal/nopoll", "internal/nvml", "internal/outfile", "internal/text", "internal/units", "memory", "recording", "recording/identity", "recording/initial", "recording/native"},
	// What NVIDIA's management library says of a machine.
	"internal/nvml":         {},
	"internal/nvml/standin": {"internal/standin"},
	// What cistern top knows: both of these, put together.
	"internal/top": {"internal/latency", "internal/live", "internal/node/control", "internal/node/protocol", "internal/nvml"},
	// For tests and for lab: kernels, and what stands in for them on the simulated device.
	"internal/gpu": {"cuda", "cuda/nvidia", "cuda/sim"},
	// Shared by the commands of lab.
	"lab/cli":   {".", "cuda", "cuda/open", "cuda/sim", "internal/gpu", "internal/units"},
	"lab/meter": {"cuda"},
	// Tests only.
	"internal/testkit":  {},
	"internal/examples": {},
	"internal/rerun":    {},
	"internal/slow":     {},
	"internal/standin":  {},
	"internal/lint":     {},
}

// commands may import everything but each other. Each package of lab is one, and lab imports them all.
const commands, lab = "cmd/", "lab"

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		name := p.short()
		allowed, known := mayImport[name]
		inLab := strings.HasPrefix(name, lab+"/")
		if !known && !strings.HasPrefix(name, commands) && !inLab && name != lab {
			t.Errorf("%s: not in the table of imports; see ARCHITECTURE.md for where a package belongs", name)
			continue
		}
		for _, i := range p.Imports {
			i, ours := ownPackage(i)
			if !ours {
				continue
			}
			command := strings.HasPrefix(i, commands) || inLab && strings.HasPrefix(i, lab+"/") && mayImport[i] == nil
			if command || known && !slices.Contains(allowed, i) {
				t.Errorf("%s imports %s; it may import %v", name, i, allowed)
			}
		}
	}
}

// Tests reach further, but an engine whose tests look into replay, or drivers whose tests know the engine, could not be
// taken apart any more.
func TestImportsOfTests(t *testing.T) {
	never := map[string][]string{
		".":                    {"analyze", "replay", "report", "recording", "recording/initial", "recording/native"},
		"internal/engine":      {".", "analyze", "replay", "report", "recording", "recording/initial", "recording/native"},
		"internal/heap":        {".", "cuda/nvidia", "cuda/sim", "internal/engine", "replay"},
		"internal/engine/phys": {".", "internal/engine", "replay"},
		"cuda/sim":             {".", "cuda/nvidia", "internal/engine", "replay", "recording", "recording/initial", "recording/native"},
		"cuda/nvidia":          {".", "cuda/sim", "internal/engine", "replay", "recording", "recording/initial", "recording/native"},
		"trace":                {".", "analyze", "internal/engine", "replay", "report"},
		"export":               {".", "internal/engine", "replay", "report"},
		"replay":               {"analyze", "internal/engine", "internal/engine/phys", "internal/heap", "report"},
		"analyze":              {"report"},
	}
	for _, p := range packages(t) {
		name := p.short()
		if strings.HasPrefix(name, "recording/") {
			name = "recording"
		}
		for _, i := range append(p.TestImports, p.XTestImports...) {
			if i, ours := ownPackage(i); ours && slices.Contains(never[name], i) {
				t.Errorf("a test of %s imports %s", p.short(), i)
			}
		}
	}
}

// TestLocksAreChecked: a test that runs the engine checks the order of its locks.
func TestLocksAreChecked(t *testing.T) {
	const checked = module + "/internal/lockrank/checked"
	tests := 0
	list, err := inModules("go", "list", "-test", "-json=ImportPath,Deps", "./...")
	if err != nil {
		t.Fatal(err)
	}
	for d := json.NewDecoder(bytes.NewReader(list)); d.More(); {
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
		if !test || !slices.Contains(p.Deps, module+"/internal/engine") {
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
			if _, ours := ownPackage(d); !ours {
				t.Errorf("%s needs %s", module+name, d)
			}
		}
		std := strings.Fields(string(goCommand(t, "list", "-deps", module+name)))
		if slices.Contains(std, "net") || slices.Contains(std, "net/http") {
			t.Errorf("%s brings in package net", module+name)
		}
	}
}

// TestMetricsStayInTheDaemon: neither the C library nor a Go program that connects to the node's broker brings in Prometheus.
func TestMetricsStayInTheDaemon(t *testing.T) {
	for name, has := range map[string]bool{"/cmd/libcistern": false, "/node": false, "/cmd/cistern": true} {
		deps := string(goCommand(t, "list", "-deps", module+name))
		if strings.Contains(deps, "github.com/prometheus/") != has {
			t.Errorf("%s: needs Prometheus is %v, want %v", module+name, !has, has)
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

// ownPackage is a package of the module by its folder.
func ownPackage(path string) (name string, ours bool) {
	if path == module {
		return ".", true
	}
	return strings.CutPrefix(path, module+"/")
}
