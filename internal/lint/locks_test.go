package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// What the analyser (gvisor.dev/gvisor/tools/checklocks) cannot express of how the engine locks. Package lockrank checks the
// same code when it runs.
var (
	finding = regexp.MustCompile(`(?m)^(.+\.go):(\d+):(\d+): (.*)$`)
	// A function literal, or the body of a loop over a function, has no annotation, and the analyser does not know when it is
	// called.
	ofLiteral = regexp.MustCompile(`\{(freevar:|param:arg\d)`)
	// The engine locks arenas several at once, with Device.mu, or not if the caller named one as its own: which ones is known
	// when the program runs.
	ofArena = regexp.MustCompile(`arena\)\)\.mu|arenas\)\)\[|\.held\)\)\[`)
	// Device.mu has a name through each object of the device, and a goroutine holds no other device's.
	deviceMu     = regexp.MustCompile(`\.gpu\)\)?\.mu\)|\{param:g\}\.mu\)`)
	pausing      = regexp.MustCompile(`\.paused\)\)\.mu\)`) // likewise
	needsAnother = regexp.MustCompile(`^(must hold|invalid field access)`)
)

// TestLocks: fields are used, and functions called, with the locks that their annotations (+checklocks) name. A function that
// lets go what its caller holds has it again when it returns.
func TestLocks(t *testing.T) {
	if testing.Short() {
		t.Skip("static analysis takes a minute the first time")
	}
	_, err := inModules(tool(t, "checklocks"), "-test=false", "-inferred=false", "-atomic=false", "-wrappers=false", "./...")
	report := ""
	if err != nil {
		report = err.Error()
	}
	found := finding.FindAllStringSubmatch(report, -1)
	if err != nil && len(found) == 0 {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, m := range found {
		what, held, _ := strings.Cut(m[4], "(locks:")
		at, _ := filepath.Rel(root(t), m[1])
		switch line := at + ":" + m[2] + ": " + m[4]; {
		case seen[line], ofArena.MatchString(m[4]) && !strings.HasPrefix(at, "internal/engine/arena/"), ofLiteral.MatchString(m[4]):
		case needsAnother.MatchString(what) && deviceMu.MatchString(what) && deviceMu.MatchString(held):
		case needsAnother.MatchString(what) && pausing.MatchString(what) && pausing.MatchString(held):
		case inFuncLit(t, at, m[2], m[3]):
		default:
			t.Error(line)
			seen[line] = true
		}
	}
	if n := strings.Count(read(t, "internal/engine/device.go"), "+checklocks:"); n == 0 {
		t.Error("nothing is annotated")
	}
}

// inFuncLit reports whether a place lies in a function literal: that has no annotation, and the analyser does not know when it
// is called.
func inFuncLit(t *testing.T, file, line, column string) (in bool) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, filepath.Join(root(t), file), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	l, _ := strconv.Atoi(line)
	c, _ := strconv.Atoi(column)
	at := fset.File(f.Pos()).LineStart(l) + token.Pos(c-1)
	ast.Inspect(f, func(n ast.Node) bool {
		if x, ok := n.(*ast.FuncLit); ok {
			in = in || x.Pos() <= at && at < x.End()
		}
		return !in
	})
	return in
}
