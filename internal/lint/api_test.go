package lint

import (
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	load "golang.org/x/tools/go/packages"
)

// TestPublicAPI: programs outside the module can name every type that they meet through its packages. So nothing that a public
// package exports has a type of an internal one, through however many fields and signatures.
func TestPublicAPI(t *testing.T) {
	if testing.Short() {
		t.Skip("loading the types takes seconds")
	}
	pkgs, err := load.Load(&load.Config{Dir: root(t), Mode: load.NeedName | load.NeedImports | load.NeedTypes}, "./...")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, p := range pkgs {
		if len(p.Errors) > 0 {
			t.Fatal(p.Errors)
		}
		if !public(p.PkgPath) {
			continue
		}
		seen++
		for _, found := range internalTypes(p.Types) {
			t.Error(found)
		}
	}
	if seen < 10 {
		t.Errorf("%d public packages: this test no longer finds them", seen)
	}
}

// public reports whether a package is for other programs to import.
func public(path string) bool {
	name, ours := ownPackage(path)
	first, _, _ := strings.Cut(name, "/")
	return ours && !internal(path) && !slices.Contains([]string{"cmd", "lab", "examples"}, first)
}

func internal(path string) bool { return slices.Contains(strings.Split(path, "/"), "internal") }

// internalTypes are the types of internal packages that a package exports, each with the way to it.
func internalTypes(p *types.Package) []string {
	w := &apiWalk{seen: map[*types.TypeName]bool{}}
	for _, name := range p.Scope().Names() {
		if o := p.Scope().Lookup(name); o.Exported() {
			way := p.Path() + "." + name
			if of, ok := o.(*types.TypeName); ok && !of.IsAlias() {
				w.declared(way, of)
			} else {
				w.use(way, o.Type())
			}
		}
	}
	slices.Sort(w.found)
	return w.found
}

// apiWalk goes through the types that a package exports.
type apiWalk struct {
	seen  map[*types.TypeName]bool
	found []string
}

// use looks at a type where it is used.
func (w *apiWalk) use(way string, t types.Type) {
	switch t := t.(type) {
	case *types.Alias:
		if w.declaredHere(way, t.Obj()) {
			w.arguments(way, t.TypeArgs())
			w.use(way, t.Rhs())
		}
	case *types.Named:
		if w.declaredHere(way, t.Obj()) {
			w.arguments(way, t.TypeArgs())
			w.declared(way, t.Obj())
		}
	case *types.Pointer:
		w.use(way, t.Elem())
	case *types.Slice:
		w.use(way, t.Elem())
	case *types.Array:
		w.use(way, t.Elem())
	case *types.Chan:
		w.use(way, t.Elem())
	case *types.Map:
		w.use(way, t.Key())
		w.use(way, t.Elem())
	case *types.Struct:
		for f := range t.Fields() {
			if f.Exported() {
				w.use(way+"."+f.Name(), f.Type())
			}
		}
	case *types.Interface:
		for m := range t.Methods() {
			if m.Exported() {
				w.use(way+"."+m.Name(), m.Type())
			}
		}
		for of := range t.EmbeddedTypes() {
			w.use(way, of)
		}
	case *types.Union:
		for term := range t.Terms() {
			w.use(way, term.Type())
		}
	case *types.Signature:
		w.parameters(way, t.TypeParams())
		for v := range t.Params().Variables() {
			w.use(way, v.Type())
		}
		for v := range t.Results().Variables() {
			w.use(way, v.Type())
		}
	}
}

func (w *apiWalk) arguments(way string, list *types.TypeList) {
	for t := range list.Types() {
		w.use(way, t)
	}
}

func (w *apiWalk) parameters(way string, list *types.TypeParamList) {
	for t := range list.TypeParams() {
		w.use(way, t.Constraint())
	}
}

// declaredHere reports whether a type that is used is of a public package of the module, whose parts count as well. Types of an
// internal package are found.
func (w *apiWalk) declaredHere(way string, of *types.TypeName) bool {
	if of.Pkg() == nil {
		return false
	}
	_, ours := ownPackage(of.Pkg().Path())
	if ours && internal(of.Pkg().Path()) {
		w.found = append(w.found, fmt.Sprintf("%s: %s.%s", way, of.Pkg().Path(), of.Name()))
		return false
	}
	return ours
}

// declared looks at what a type is made of, and at its methods, promoted ones included.
func (w *apiWalk) declared(way string, of *types.TypeName) {
	if w.seen[of] {
		return
	}
	w.seen[of] = true
	named, ok := of.Type().(*types.Named)
	if !ok {
		return
	}
	w.parameters(way, named.TypeParams())
	w.use(way, named.Underlying())
	for m := range types.NewMethodSet(types.NewPointer(named)).Methods() {
		if m.Obj().Exported() {
			w.use(way+"."+m.Obj().Name(), m.Type())
		}
	}
}

// The walk finds an internal type wherever it can be, and nothing else.
func TestInternalTypes(t *testing.T) {
	const hidden, open = module + "/internal/hidden", module + "/open"
	fset := token.NewFileSet()
	known := map[string]*types.Package{}
	compile := func(path, source string) *types.Package {
		t.Helper()
		file, err := parser.ParseFile(fset, path+".go", source, 0)
		if err != nil {
			t.Fatal(err)
		}
		p, err := (&types.Config{Importer: fakes{known, importer.Default()}}).Check(path, fset, []*ast.File{file}, nil)
		if err != nil {
			t.Fatal(err)
		}
		known[path] = p
		return p
	}
	compile(hidden, `package hidden
		type T struct{ N int }
		func (T) Get() T { return T{} }
		type Plain struct{ N int }
		type Constraint interface{ ~int }
		const C Level = 1
		type Level int`)
	compile(module+"/other", `package other
		import "`+hidden+`"
		type Holder struct { Inner *Inner }
		type Inner struct { T []hidden.T }
		type Good struct { t hidden.T; N int }`)
	got := internalTypes(compile(open, `package open
		import ("`+hidden+`"; "`+module+`/other"; "sync/atomic")
		type Alias = hidden.T
		type Fields struct { F map[string]*hidden.T; private hidden.T }
		type Embedded struct { hidden.Plain }
		type promoting struct { hidden.T }
		type Promoted struct { promoting }
		type Func func(...hidden.T)
		type Interface interface { M() (int, <-chan hidden.T) }
		type Generic[P hidden.Constraint] struct {}
		type Argument struct { A atomic.Pointer[other.Good]; B other.Good; C []atomic.Int64 }
		type Deep struct { H other.Holder }
		type hides struct { T hidden.T }
		const Constant = hidden.C
		var Variable [2]hidden.T
		func Function(f func(hidden.T)) {}
		func Returns() hides { return hides{} }
		func (Fields) Method() hidden.T { return hidden.T{} }
		func (Fields) private2() hidden.T { return hidden.T{} }
		func Instance() (x Box[hidden.T]) { return }
		type Box[X any] struct { x X }
		type Good struct { t hidden.T; promoting2 int }
		func (Good) Fine(other.Good) error { return nil }
		func unexported(hidden.T) {}`))
	want := []string{
		"Alias: T", "Constant: Level", "Deep.H.Inner.T: T", "Embedded.Plain: Plain", "Fields.F: T", "Fields.Method: T", "Func: T", "Function: T",
		"Generic: Constraint", "Instance: T", "Interface.M: T", "Promoted.Get: T", "Returns.T: T", "Variable: T",
	}
	for i := range got {
		got[i] = strings.ReplaceAll(strings.TrimPrefix(got[i], open+"."), hidden+".", "")
	}
	if d := cmp.Diff(slices.Compact(got), want); d != "" {
		t.Errorf("found (-), to be found (+):\n%s", d)
	}
	if public(hidden) || !public(open) || !public(module) || public(module+"/cmd/cistern") || public(module+"/recording/internal/input") || public("fmt") {
		t.Error("which packages are public")
	}
}

// fakes imports packages of a test before others.
type fakes struct {
	known map[string]*types.Package
	rest  types.Importer
}

func (f fakes) Import(path string) (*types.Package, error) {
	if p := f.known[path]; p != nil {
		return p, nil
	}
	return f.rest.Import(path)
}
