package lint

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// module is the import path that all of the house's begin with.
const module = "github.com/cistern-gpu/cistern"

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
	cmd := exec.Command("go", "list", "-json", "./...")
	cmd.Dir = filepath.Join("..", "..")
	out, err := output(cmd)
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

// packages are all packages of the module, as this platform builds them.
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

// sources are the files of the tree that people write, from the root of the module, but for test data: what git
// tracks or would track, and where there is no git, all that is not made by the build.
func sources(t testing.TB, extensions ...string) []string {
	t.Helper()
	dir := root(t)
	var files []string
	cmd := exec.CommandContext(t.Context(), "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = dir
	if out, err := cmd.Output(); err == nil && len(out) > 0 {
		files = strings.Split(strings.TrimRight(string(out), "\x00"), "\x00")
	} else {
		made := []string{"bin", "lib", "dist", "gpu-bundle", "node_modules", ".git"}
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if d.IsDir() && slices.Contains(made, d.Name()) {
				return filepath.SkipDir
			}
			if d.Type().IsRegular() {
				rel, err := filepath.Rel(dir, path)
				if err != nil {
					return err
				}
				files = append(files, filepath.ToSlash(rel))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	var chosen []string
	for _, f := range files {
		if strings.Contains(f, "testdata/fuzz/") {
			continue
		}
		if len(extensions) > 0 && !slices.Contains(extensions, filepath.Ext(f)) {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, f)); err == nil { // tracked, but deleted by the change at hand
			chosen = append(chosen, f)
		}
	}
	if len(chosen) == 0 {
		t.Fatalf("no source files %v under %s", extensions, dir)
	}
	return chosen
}

func read(t testing.TB, file string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root(t), filepath.FromSlash(file)))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
