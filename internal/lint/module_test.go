package lint

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// module is the import path that all packages of the module begin with.
const module = "github.com/cistern-gpu/cistern"

// modules are the folders of the tree's modules, from the root. The programs for GPUs are one of their own.
var modules = []string{".", "lab"}

// goPackage is what `go list -json` says of a package, as far as it is looked at here.
type goPackage struct {
	ImportPath   string
	Dir          string
	Doc          string
	Name         string
	Imports      []string
	TestImports  []string
	XTestImports []string
}

// short is the package's folder from the root of the module, "." for the root itself.
func (p *goPackage) short() string {
	if p.ImportPath == module {
		return "."
	}
	return strings.TrimPrefix(p.ImportPath, module+"/")
}

// root is the folder of the module.
func root(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// goCommand runs the go command in the root of the module and returns what it printed on standard output.
func goCommand(t testing.TB, args ...string) []byte {
	t.Helper()
	out, err := goRun(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func goRun(t testing.TB, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = root(t)
	return output(cmd)
}

// inModules runs a command in each module and returns what it printed on standard output in all.
func inModules(name string, args ...string) (all []byte, err error) {
	for _, folder := range modules {
		cmd := exec.Command(name, args...)
		cmd.Dir = filepath.Join("..", "..", folder)
		out, failed := output(cmd)
		all, err = append(all, out...), errors.Join(err, failed)
	}
	return all, err
}

// tool is the path of a tool that go.mod names, so that it runs in the other modules too.
func tool(t testing.TB, name string) string {
	return strings.TrimSpace(string(goCommand(t, "tool", "-n", name)))
}

// output is what a command printed on standard output; the error has the rest.
func output(cmd *exec.Cmd) ([]byte, error) {
	var out, report bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &report
	if err := cmd.Run(); err != nil {
		return out.Bytes(), &commandError{cmd, err, strings.TrimSpace(out.String() + report.String())}
	}
	return out.Bytes(), nil
}

type commandError struct {
	cmd    *exec.Cmd
	err    error
	report string
}

func (e *commandError) Error() string {
	return strings.Join(e.cmd.Args, " ") + ": " + e.err.Error() + "\n" + e.report
}

var listed = sync.OnceValues(func() ([]*goPackage, error) {
	out, err := inModules("go", "list", "-json", "./...")
	if err != nil {
		return nil, err
	}
	var all []*goPackage
	for d := json.NewDecoder(bytes.NewReader(out)); d.More(); {
		p := new(goPackage)
		if err := d.Decode(p); err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
})

// packages are all packages of the modules, as this platform builds them.
func packages(t testing.TB) []*goPackage {
	t.Helper()
	all, err := listed()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 10 {
		t.Fatalf("go list found %d packages only", len(all))
	}
	return all
}

// sources are the files of the tree that people write, from the root of the module: all but what the build makes, what
// git keeps for itself and the corpora of fuzzing. The tree is walked in this process, so that the go command notices
// a new file and runs these tests again.
func sources(t testing.TB, extensions ...string) []string {
	t.Helper()
	dir := root(t)
	made := []string{"bin", "lib", "gpu-bundle", "node_modules", ".git", ".venv"}
	var files []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() && (slices.Contains(made, d.Name()) || strings.HasSuffix(rel, "/testdata/fuzz") ||
			d.Name() == "dist") {
			return filepath.SkipDir
		}
		ext := filepath.Ext(rel)
		if d.Type().IsRegular() && ext != ".test" && ext != ".prof" && (len(extensions) == 0 || slices.Contains(extensions, ext)) {
			files = append(files, rel)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatalf("no source files %v under %s", extensions, dir)
	}
	return files
}

func read(t testing.TB, file string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root(t), filepath.FromSlash(file)))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
