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
	"unicode"
)

// privateWords are words that no name may have, each with the term of the field that is used instead.
var privateWords = map[string]string{
	"absence":   "paused range",
	"asleep":    "paused",
	"climb":     "request",
	"everybody": "all threads, all observers",
	"foreign":   "imported, user upstream, unknown",
	"front":     "magazine",
	"hasty":     "throttled",
	"hole":      "unmapped range",
	"hollow":    "release",
	"house":     "module, package",
	"introduce": "publish",
	"ladder":    "stages",
	"lane":      "arena",
	"lend":      "reuse across streams",
	"lent":      "reused across streams",
	"mend":      "fix",
	"nobody":    "none",
	"pace":      "throttle",
	"patience":  "timeout",
	"punch":     "decommit",
	"rung":      "stage",
	"settle":    "sync, drain, rebalance",
	"shed":      "release",
	"teller":    "observer",
	"thin":      "release, downsample",
	"ticket":    "token",
	"told":      "notified",
	"tray":      "slot",
	"untold":    "pending",
	"vacate":    "decommit",
	"vault":     "staging buffers",
	"zombie":    "stale mapping",
}

// allowedNames have a private word for a reason, everywhere or in one file.
var allowedNames = map[string]string{
	"StageLend":           "a stage, by its name in settings and in the public API",
	"ByLend":              "by_lend in JSON",
	"by_lend":             "a field of cistern.h",
	"_foreign_stream_ref": "an attribute of CuPy's",
}

// TestWords: names use the terms of the field. Go names are checked where they are declared, those of C, C++, Python and
// JavaScript wherever they stand.
func TestWords(t *testing.T) {
	used := map[string]bool{}
	for _, f := range sources(t, ".go", ".c", ".h", ".cc", ".cpp", ".py", ".js", ".mjs") {
		names, err := namesIn(f, read(t, f))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range append(names, strings.TrimSuffix(path.Base(f), path.Ext(f))) {
			word := privateWord(name)
			if word == "" {
				continue
			}
			at := f + ": " + name
			if used[name], used[at] = true, true; allowedNames[name] == "" && allowedNames[at] == "" {
				t.Errorf("%s: instead of %q use %s", at, word, privateWords[word])
			}
		}
	}
	for name := range allowedNames {
		if !used[name] {
			t.Errorf("%s is allowed and nowhere: take it out", name)
		}
	}
}

// TestWordsFinds: TestWords can fail, in each language.
func TestWordsFinds(t *testing.T) {
	for _, c := range []struct{ file, text, want string }{
		{"a.go", "package a\n\ntype laneSet struct{ rungs int }\n\nfunc (l *laneSet) Settle(told bool) (hole int) { punchAt := 1; _ = punchAt; return }\n",
			"Settle hole laneSet punchAt rungs told"},
		{"b.go", "package b\n\nconst Front = \"tray\" // a vault\n\nvar m = map[string]int{\"zombie\": 1}\n\nfunc f() { for lane := range m { _ = lane } }\n",
			"Front lane"},
		{"c.go", "package c\n\n// Frontier, planet, unsettled and thing have none of the words.\nvar frontier, planet, unsettled, thing = 1, 2, 3, 4\n", ""},
		{"d.c", "/* lane */ static int tray_of(struct lane *l) { return l->ZOMBIES + \"vault\"[0]; } // rung\n", "ZOMBIES lane tray_of"},
		{"e.cpp", "auto s = R\"(lane)\"; std::vector<Ticket> untold{'\\'', L'x'};\n", "Ticket untold"},
		{"f.py", "def settle(x): # a lane\n    \"\"\"lane\"\"\"\n    return f'{rung}' + 'it''s' + x._patience\n", "_patience settle"},
		{"g.js", "const bandLane = `lane`; // rung\n", "bandLane"},
	} {
		names, err := namesIn(c.file, c.text)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, name := range names {
			if privateWord(name) != "" {
				got = append(got, name)
			}
		}
		slices.Sort(got)
		if s := strings.Join(slices.Compact(got), " "); s != c.want {
			t.Errorf("%s: %q, want %q", c.file, s, c.want)
		}
	}
}

// privateWord is the private word that a name has as one of its words, also in the plural or the past; "" if none.
func privateWord(name string) string {
	for _, w := range wordsOf(name) {
		for _, ending := range []string{"", "s", "d", "ed"} {
			if stem, ok := strings.CutSuffix(w, ending); ok && privateWords[stem] != "" {
				return stem
			}
		}
	}
	return ""
}

// wordsOf splits a name at underscores and capitals, in lower case: HTTPLane_of has http, lane and of.
func wordsOf(name string) (words []string) {
	r := []rune(name)
	begin := 0
	flush := func(end int) {
		if end > begin {
			words = append(words, strings.ToLower(string(r[begin:end])))
		}
		begin = end
	}
	for i, c := range r {
		switch {
		case !unicode.IsLetter(c):
			flush(i)
			begin = i + 1
		case i > begin && unicode.IsUpper(c) && (unicode.IsLower(r[i-1]) || i+1 < len(r) && unicode.IsLower(r[i+1])):
			flush(i)
		}
	}
	flush(len(r))
	return words
}

// What is no name: comments, strings and characters, of languages like C, and of Python.
var (
	notNamesOfC = regexp.MustCompile(`(?s)//[^\n]*|/\*.*?\*/|R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'` + "|`[^`]*`")
	notNamesOfP = regexp.MustCompile(`(?s)""".*?"""|'''.*?'''|#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'`)
	aName       = regexp.MustCompile(`[A-Za-z_][A-Za-z0-9_]*`)
)

// namesIn are the names that a file declares, in Go, or has, in other languages.
func namesIn(file, text string) ([]string, error) {
	switch path.Ext(file) {
	case ".go":
		return declaredIn(file, text)
	case ".py":
		return aName.FindAllString(notNamesOfP.ReplaceAllString(text, " "), -1), nil
	}
	return aName.FindAllString(notNamesOfC.ReplaceAllString(text, " "), -1), nil
}

// declaredIn are the names that a Go file declares.
func declaredIn(file, text string) (names []string, err error) {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	add := func(ids ...*ast.Ident) {
		for _, id := range ids {
			if id != nil {
				names = append(names, id.Name)
			}
		}
	}
	addVariables := func(define token.Token, to ...ast.Expr) {
		if define != token.DEFINE {
			return
		}
		for _, e := range to {
			if id, ok := e.(*ast.Ident); ok {
				add(id)
			}
		}
	}
	add(parsed.Name)
	ast.Inspect(parsed, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			add(n.Name)
		case *ast.TypeSpec:
			add(n.Name)
		case *ast.ValueSpec:
			add(n.Names...)
		case *ast.Field:
			add(n.Names...)
		case *ast.ImportSpec:
			add(n.Name)
		case *ast.LabeledStmt:
			add(n.Label)
		case *ast.AssignStmt:
			addVariables(n.Tok, n.Lhs...)
		case *ast.RangeStmt:
			addVariables(n.Tok, n.Key, n.Value)
		}
		return true
	})
	return names, nil
}
