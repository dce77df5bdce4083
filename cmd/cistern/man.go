package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// newMan is for `make install-command`.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:    "man FOLDER",
		Short:  "Write the man pages of all commands below a folder",
		Hidden: true,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s: expected one folder, got %d arguments", c.Name(), len(args))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error { return writeManPages(c.Root(), args[0]) },
	}
}

// writeManPages writes a page for a command and for each below it that its help lists.
func writeManPages(c *cobra.Command, folder string) error {
	section := manSection(c)
	dir := filepath.Join(folder, fmt.Sprintf("man%d", section))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s.%d", manName(c), section)), []byte(manPage(c)), 0o644); err != nil {
		return err
	}
	for _, sub := range manCommands(c) {
		if err := writeManPages(sub, folder); err != nil {
			return err
		}
	}
	return nil
}

// manCommands are the commands and topics that have a page. Those below `completion` are in its page.
func manCommands(c *cobra.Command) (all []*cobra.Command) {
	for _, sub := range c.Commands() {
		if !c.HasParent() && (sub.IsAvailableCommand() || sub.IsAdditionalHelpTopicCommand()) {
			all = append(all, sub)
		}
	}
	return all
}

// manSection is 1 for commands, 7 for other topics.
func manSection(c *cobra.Command) int {
	if c.IsAdditionalHelpTopicCommand() {
		return 7
	}
	return 1
}

func manName(c *cobra.Command) string { return strings.ReplaceAll(c.CommandPath(), " ", "-") }

// manPage is the help of a command as a page for man, in the language of groff's macros man(7).
func manPage(c *cobra.Command) string {
	c.InitDefaultHelpFlag()
	b := &strings.Builder{}
	fmt.Fprintf(b, ".TH %s %d \"\" \"cistern %s\" \"Cistern Manual\"\n", roff(strings.ToUpper(manName(c))), manSection(c), buildVersion().Version)
	fmt.Fprintf(b, ".SH NAME\n%s \\- %s\n", roff(manName(c)), roff(c.Short))
	if c.Runnable() {
		fmt.Fprintf(b, ".SH SYNOPSIS\n%s\n", roff(c.UseLine()))
	}
	if c.Long != "" {
		b.WriteString(".SH DESCRIPTION\n")
		manText(b, c.Long)
	}
	manList(b, c)
	manFlags(b, c)
	if c.Example != "" {
		b.WriteString(".SH EXAMPLES\n")
		manText(b, c.Example)
	}
	b.WriteString(".SH SEE ALSO\n")
	var others []string
	if c.HasParent() {
		others = append(others, manReference(c.Parent()))
	}
	for _, sub := range manCommands(c) {
		others = append(others, manReference(sub))
	}
	b.WriteString(strings.Join(append(others, "https://github.com/cistern\\-gpu/cistern"), ",\n") + "\n")
	return b.String()
}

func manReference(c *cobra.Command) string {
	return fmt.Sprintf("\\fB%s\\fR(%d)", roff(manName(c)), manSection(c))
}

// manList is the list of the commands below c.
func manList(b *strings.Builder, c *cobra.Command) {
	if !c.HasAvailableSubCommands() {
		return
	}
	b.WriteString(".SH COMMANDS\n")
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			fmt.Fprintf(b, ".TP\n\\fB%s\\fR\n%s\n", roff(sub.Name()), roff(sub.Short))
		}
	}
}

// manFlags is the list of the flags of c, those of every command included.
func manFlags(b *strings.Builder, c *cobra.Command) {
	if !c.Runnable() {
		return
	}
	b.WriteString(".SH OPTIONS\n")
	for _, set := range []*pflag.FlagSet{c.LocalFlags(), c.InheritedFlags()} {
		set.VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				fmt.Fprintf(b, ".TP\n%s\n%s\n", manFlag(f), roff(manUsage(f)))
			}
		})
	}
}

// manFlag is how a flag is given.
func manFlag(f *pflag.Flag) string {
	name := `\fB` + roff("--"+f.Name) + `\fR`
	if f.Shorthand != "" {
		name = `\fB` + roff("-"+f.Shorthand) + `\fR, ` + name
	}
	value, _ := pflag.UnquoteUsage(f)
	if value == "" {
		return name
	}
	if f.NoOptDefVal != "" {
		return name + `[=\fI` + roff(value) + `\fR]`
	}
	return name + ` \fI` + roff(value) + `\fR`
}

// manUsage is what a flag does, on one line. The default is part of it, unless it is one that the help leaves out too.
func manUsage(f *pflag.Flag) string {
	only := pflag.NewFlagSet("", pflag.ContinueOnError)
	only.AddFlag(f)
	// The help's own line: the name and value, then spaces, then the text, which may go on in lines below.
	_, text, _ := strings.Cut(strings.TrimSpace(only.FlagUsages()), "   ")
	return strings.Join(strings.Fields(text), " ")
}

// manText writes paragraphs. Indented lines keep their line breaks and columns.
func manText(b *strings.Builder, text string) {
	literal := false
	turn := func(on bool, begin, end string) {
		if on != literal {
			b.WriteString(map[bool]string{true: begin, false: end}[on])
		}
		literal = on
	}
	for _, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		if line == "" {
			turn(false, "", ".fi\n.RE\n")
			b.WriteString(".PP\n")
			continue
		}
		turn(strings.HasPrefix(line, "  "), ".RS\n.nf\n", ".fi\n.RE\n")
		b.WriteString(roff(strings.TrimPrefix(line, "  ")) + "\n")
	}
	turn(false, "", ".fi\n.RE\n")
}

// roff is text in which nothing is a request of roff's.
func roff(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~", `\(ti`).Replace(s)
	if strings.HasPrefix(s, ".") {
		s = `\&` + s
	}
	return s
}
