package lint

import (
	"go/ast"
	"go/types"
	"strings"
	"testing"

	load "golang.org/x/tools/go/packages"
)

// What a reader of the engine has to hold in mind at once: the methods and fields of a type, promoted ones counted, and the
// statements of a function.
const (
	mostMethods    = 25
	mostFields     = 20
	mostStatements = 60
)

// oversized are the parts of the engine that are larger, with their sizes: these may shrink, and must be lowered here then.
var oversized = map[string]int{
	"engine/health.Driver methods": 66, // those of cuda.Driver, which it implements
}

// TestShape holds the engine, and all packages below it, to these sizes.
func TestShape(t *testing.T) {
	if testing.Short() {
		t.Skip("loading the types takes seconds")
	}
	pkgs, err := load.Load(&load.Config{Dir: root(t), Mode: load.NeedName | load.NeedSyntax | load.NeedTypes | load.NeedTypesInfo |
		load.NeedImports | load.NeedDeps}, "./internal/engine/...", "./internal/heap", "./internal/magazine")
	if err != nil {
		t.Fatal(err)
	}
	sizes := map[string]int{}
	for _, p := range pkgs {
		if len(p.Errors) > 0 {
			t.Fatal(p.Errors)
		}
		short := strings.TrimPrefix(p.PkgPath, module+"/internal/")
		if short == "engine" {
			noBackPointers(t, p.Types.Scope())
		}
		for _, name := range p.Types.Scope().Names() {
			if named, ok := p.Types.Scope().Lookup(name).(*types.TypeName); ok && !named.IsAlias() {
				at := short + "." + name
				over(sizes, at+" methods", types.NewMethodSet(types.NewPointer(named.Type())).Len(), mostMethods)
				if s, ok := named.Type().Underlying().(*types.Struct); ok && !plain(s) {
					over(sizes, at+" fields", fields(s), mostFields)
				}
			}
		}
		for _, file := range p.Syntax {
			for _, d := range file.Decls {
				if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
					over(sizes, short+"."+receiver(f)+f.Name.Name+" statements", statements(f.Body), mostStatements)
				}
			}
		}
	}
	for what, n := range sizes {
		if n > oversized[what] {
			t.Errorf("%s: %d", what, n)
		}
	}
	for what, n := range oversized {
		if sizes[what] < n {
			t.Errorf("%s: %d in the table, %d now: lower it", what, n, sizes[what])
		}
	}
}

// noBackPointers: no part of a device knows the Device, and each uses only parts that stand above it in the list (type state).
func noBackPointers(t *testing.T, scope *types.Scope) {
	device := types.NewPointer(scope.Lookup("Device").Type())
	state := scope.Lookup("state").Type().Underlying().(*types.Struct)
	at := map[string]int{} // parts by type, with their places in the list
	for i := range state.NumFields() {
		at[state.Field(i).Type().String()] = i
	}
	for i := range state.NumFields() {
		part := state.Field(i).Type().(*types.Pointer).Elem().Underlying().(*types.Struct)
		for f := range part.Fields() {
			if types.Identical(f.Type(), device) {
				t.Errorf("engine.state.%s: %s points back to the Device", state.Field(i).Name(), f.Name())
			}
			if k, ok := at[f.Type().String()]; ok && k >= i {
				t.Errorf("engine.state.%s: uses %s, which stands below it", state.Field(i).Name(), f.Name())
			}
		}
	}
	if state.NumFields() < 10 {
		t.Errorf("the state has %d parts: this test no longer finds them", state.NumFields())
	}
}

// over notes what is larger than most.
func over(sizes map[string]int, what string, n, most int) {
	if n > most {
		sizes[what] = n
	}
}

// plain reports whether a struct is data for others to read: all fields are exported.
func plain(s *types.Struct) bool {
	for f := range s.Fields() {
		if !f.Exported() || f.Embedded() {
			return false
		}
	}
	return true
}

// fields counts the fields of a struct, those of embedded structs included.
func fields(s *types.Struct) int {
	n := s.NumFields()
	for f := range s.Fields() {
		if !f.Embedded() {
			continue
		}
		of := f.Type()
		if p, ok := of.(*types.Pointer); ok {
			of = p.Elem()
		}
		if inner, ok := of.Underlying().(*types.Struct); ok {
			n += fields(inner)
		}
	}
	return n
}

// receiver is a method's type and a dot, "" for a function.
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	of := f.Recv.List[0].Type
	if star, ok := of.(*ast.StarExpr); ok {
		of = star.X
	}
	if generic, ok := of.(*ast.IndexExpr); ok {
		of = generic.X
	}
	if name, ok := of.(*ast.Ident); ok {
		return name.Name + "."
	}
	return ""
}

// statements counts the statements of a body, function literals included and blocks not.
func statements(body *ast.BlockStmt) (n int) {
	ast.Inspect(body, func(x ast.Node) bool {
		if _, ok := x.(*ast.BlockStmt); ok {
			return true
		}
		if _, ok := x.(ast.Stmt); ok {
			n++
		}
		return true
	})
	return n
}
