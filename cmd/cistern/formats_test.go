package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/export"
)

// TestFormatsPage: docs/formats.md has what the formats contain and the columns of the tables, from where the program has them.
// `go test ./cmd/cistern -run TestFormatsPage -rewrite` writes it.
func TestFormatsPage(t *testing.T) {
	const file = "../../docs/formats.md"
	var b strings.Builder
	b.WriteString("# Formats\n\n`cistern convert` writes a recording in the format that the ending of the output or `--to` names.\n" +
		"\n<!-- Written by go test ./cmd/cistern -run TestFormatsPage -rewrite -->\n\n| format | endings | contents |\n|---|---|---|\n")
	for _, f := range formats {
		fmt.Fprintf(&b, "| `%s` | `%s` | %s |\n", f.name, strings.Join(f.endings, "`, `"), f.what)
	}
	b.WriteString("\nOf many ranks, each process leaves a summary beside its recording, which is [described here](../fleet/format.md).\n")
	for _, f := range formatDocs {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", f.name, f.text)
	}
	for _, table := range export.Tables {
		fmt.Fprintf(&b, "\n## Table %s\n\n%s%s.\n\n%s", table.Name, strings.ToUpper(table.What[:1]), table.What[1:], columnsTable(table))
	}
	if flag.Lookup("rewrite").Value.String() == "true" {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil || string(got) != b.String() {
		t.Errorf("%s is not what the program has, %v: run this test with -rewrite", file, err)
	}
}
