package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A name that denies something is a double negative as soon as it is false (NoMagazine: false). A switch is named after what it
// switches on, and its default is in the documentation.
var (
	negativeName = regexp.MustCompile(`(^|[a-z0-9])(No|Not|Non|Never|Dont|Disabled?|Without|Skip|Omit)([A-Z0-9]|$)`)
	negativeFlag = regexp.MustCompile(`^(no|not|non|never|dont|disable|without|skip|omit)[-_]`)
)

// negativeAllowed are names that deny something for a reason.
var negativeAllowed = map[string]string{
	"analyze.Search.NotTried":              "a list of results; not_tried in JSON",
	"cuda/sim.Driver.NewStreamNonBlocking": "CUDA's flag is CU_STREAM_NON_BLOCKING",
	"replay.TorchConf.MaxNonSplitRound":    "PyTorch's setting is max_non_split_rounding_mb",
	"cmd/cistern --no-build":               "the convention of command lines for a default that is on, as --no-deps of pip",
}

// TestNegativeNames: what public packages export, and the flags of the command, have no name that denies something.
func TestNegativeNames(t *testing.T) {
	used := map[string]bool{}
	for _, f := range sources(t, ".go") {
		dir := path.Dir(f)
		if strings.HasSuffix(f, "_test.go") || !public(path.Join(module, dir)) && dir != "cmd/cistern" {
			continue
		}
		names, err := negativeNames(f, read(t, f))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			name = strings.TrimPrefix(dir+"."+name, "./")
			if dir == "cmd/cistern" {
				name = strings.Replace(name, ".--", " --", 1)
				if !strings.Contains(name, " --") {
					continue // not for others to import
				}
			}
			if used[name] = true; negativeAllowed[name] == "" {
				t.Errorf("%s: name it after what it does, as in Magazine instead of NoMagazine, or add it to negativeAllowed with the reason", name)
			}
		}
	}
	for name := range negativeAllowed {
		if !used[name] {
			t.Errorf("negativeAllowed has %s, which there is not", name)
		}
	}
}

// negativeNames are the names of a file that deny something: exported functions, types, fields and methods, and flags. Constants
// and errors are not among them: they are answers (NoTag, ErrNotFound).
func negativeNames(name, text string) (found []string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	add := func(of string, id *ast.Ident) {
		if id.IsExported() && negativeName.MatchString(id.Name) {
			found = append(found, strings.TrimPrefix(of+"."+id.Name, "."))
		}
	}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			add(strings.TrimSuffix(receiver(d), "."), d.Name)
		case *ast.GenDecl:
			for _, s := range d.Specs {
				of, ok := s.(*ast.TypeSpec)
				if !ok {
					continue
				}
				add("", of.Name)
				ast.Inspect(of.Type, func(n ast.Node) bool {
					if field, ok := n.(*ast.Field); ok {
						for _, id := range field.Names {
							add(of.Name.Name, id)
						}
					}
					return true
				})
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			if flag := flagName(call); negativeFlag.MatchString(flag) {
				found = append(found, "--"+flag)
			}
		}
		return true
	})
	return found, nil
}

// flagName is the flag that a call declares (Var, BoolVar, StringVarP and so on have it in the second place), "" of other calls.
func flagName(call *ast.CallExpr) string {
	method, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !strings.HasSuffix(strings.TrimSuffix(method.Sel.Name, "P"), "Var") || len(call.Args) < 2 {
		return ""
	}
	lit, ok := call.Args[1].(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return ""
	}
	return strings.Trim(lit.Value, `"`)
}

// The rule finds a negative wherever a name has one, and no word that only begins like one.
func TestNegativeNamesFound(t *testing.T) {
	got, err := negativeNames("a.go", `package a
		type Options struct { NoFront, Notes, Normal bool; Inner struct { DisableTop bool }; noTop bool }
		type Reader interface { ReadWithoutLock(); Read() }
		const NoTag = 2
		var ErrNotFound error
		type WithoutLocks int
		func (o *Options) SkipHeader() {}
		func Disable() {}
		func Notify(skipAll bool) {}
		func f() { c.Flags().BoolVar(&x, "no-color", false, ""); c.Flags().StringVarP(&y, "node", "n", "", ""); d.Var(z, "skip-build", "") }`)
	want := []string{"Options.NoFront", "Options.DisableTop", "Reader.ReadWithoutLock", "WithoutLocks", "Options.SkipHeader", "Disable",
		"--no-color", "--skip-build"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("found %q, %v, want %q", got, err, want)
	}
}
