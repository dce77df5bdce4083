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

// newFormatsTopic is a text of help, without a command: what is in the formats that convert writes.
func newFormatsTopic() *cobra.Command {
	return &cobra.Command{Use: "formats", Short: "What is in the formats and tables that convert writes, and in which units", Long: formatsHelp()}
}

// formatsHelp says what is in each format, and lists the columns of the tables.
func formatsHelp() string {
	var b strings.Builder
	b.WriteString(export.PyTorchDoc + "\n\n" + export.PprofDoc + "\n\n" + export.PerfettoDoc + "\n")
	for _, t := range export.Tables {
		fmt.Fprintf(&b, "\nTable %s: %s.\n\n", t.Name, t.What)
		for _, c := range t.Columns {
			null := ""
			if c.Null {
				null = "null"
			}
			head := fmt.Sprintf("  %-21s%-8s %-5s", c.Name, c.Type, null)
			for _, line := range wrapped(c.Doc, 118-len(head)) {
				fmt.Fprintf(&b, "%s %s\n", head, line)
				head = strings.Repeat(" ", len(head))
			}
		}
	}
	return strings.TrimRight(b.String(), "\n")
}
