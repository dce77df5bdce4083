package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/export"
)

// helpTemplate is a command's help: what it does in a line, examples, the usage with its flags, and the explanation.
const helpTemplate = `{{.Short | trimTrailingWhitespaces}}
{{if .HasExample}}
{{.Example}}
{{end}}{{if or .Runnable .HasSubCommands}}
{{.UsageString}}{{end}}{{with .Long}}
{{. | trimTrailingWhitespaces}}
{{end}}`

// usageTemplate is cobra's without the examples, which stand above it.
const usageTemplate = `Usage:{{if .Runnable}}
  {{.UseLine}}{{end}}{{if .HasAvailableSubCommands}}
  {{.CommandPath}} [command]

Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}{{if .HasAvailableInheritedFlags}}

Flags of every command:
{{.InheritedFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}{{if .HasHelpSubCommands}}

Further help:{{range .Commands}}{{if .IsAdditionalHelpTopicCommand}}
  cistern help {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableSubCommands}}

"{{.CommandPath}} [command] --help" explains a command.{{end}}
`

// newFormatsTopic is a text of help, without a command: what the formats that convert writes contain.
func newFormatsTopic() *cobra.Command {
	return &cobra.Command{Use: "formats", Short: "What the formats of cistern convert contain, and in which units", Long: formatsHelp(),
		Example: "  cistern convert run.pickle -o run.pftrace                  a timeline for ui.perfetto.dev\n" +
			"  cistern convert run.pickle -o peak.pb.gz                   a profile of the peak for go tool pprof\n" +
			"  cistern convert run.pickle --table allocations -o run.csv  a table"}
}

// formatDocs are what formats contain, in the order of the help and the documentation.
var formatDocs = []struct{ name, text string }{
	{"pytorch", export.PyTorchDoc}, {"pprof", export.PprofDoc}, {"perfetto", export.PerfettoDoc},
	{"parquet, csv", "A table, chosen by --table. In CSV, null is an empty field, and a text that begins as a formula does (= + - @) has an\n" +
		"apostrophe before it."},
}

// formatsHelp says what each format contains, and which tables there are.
func formatsHelp() string {
	var b strings.Builder
	for _, f := range formatDocs {
		fmt.Fprintf(&b, "%s\n  %s\n\n", f.name, strings.ReplaceAll(f.text, "\n", "\n  "))
	}
	for _, t := range export.Tables {
		fmt.Fprintf(&b, "  --table %-12s %s\n", t.Name, t.What)
	}
	b.WriteString("\ndocs/formats.md lists the columns of the tables.")
	return b.String()
}
