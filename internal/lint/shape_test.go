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
	"engine.Allocator methods":     32,
	"engine.Device methods":        31,
	"engine.Pool methods":          37,
	"engine.request methods":       34,
	"engine/health.Driver methods": 58, // those of cuda.Driver, which it implements
	"engine.request fields":        21,
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
