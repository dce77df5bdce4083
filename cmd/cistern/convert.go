package main

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/trace"
)

// formats are what convert writes, by the name that --to takes, with the endings that stand for them.
var formats = []struct {
	name    string
	endings []string
	write   func(w io.Writer, f *trace.File) error
}{
	{"cistern", []string{".cistern"}, trace.WriteCistern},
	{"pytorch", []string{".pickle", ".pkl"}, func(w io.Writer, f *trace.File) error {
		return trace.WritePyTorch(w, f.Traces...)
	}},
}

func newConvert(a *app) *cobra.Command {
	var to, out string
	c := &cobra.Command{
		Use:   "convert [flags] TRACE -o FILE",
		Short: "Rewrite a recorded run in another format",
		Long: "Convert reads any trace and writes it in Cistern's compact format or as a PyTorch memory snapshot, which " +
			"PyTorch's\nviewer opens. Without --to, the ending of FILE says which: .cistern, .pickle or .pkl.",
		Example: "  cistern convert snapshot.pickle -o snapshot.cistern",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s: want one trace, got %d", c.Name(), len(args))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if err := needOutput(c, out); err != nil {
				return err
			}
			write, err := writerFor(to, out)
			if err != nil {
				return err
			}
			o, err := a.openOutput(out)
			if err != nil {
				return err
			}
			defer o.abandon()
			bar := a.startProgress("converting", 1)
			defer bar.end()
			return eachFile(c.Context(), a, args, bar, func(f *trace.File, _ func(int, int)) (struct{}, error) {
				if err := write(o, f); err != nil {
					return struct{}{}, fmt.Errorf("writing %s: %w", displayOutput(out), err)
				}
				return struct{}{}, o.commit()
			}, func(_ int, r outcome[struct{}]) {
				if r.err != nil {
					a.fail(r.err)
				}
			})
		},
	}
	c.Flags().StringVarP(&out, "output", "o", "", "`file` to write; - is standard output")
	c.Flags().StringVar(&to, "to", "", "format to write: cistern or pytorch (default by the ending of the output)")
	_ = c.RegisterFlagCompletionFunc("to", cobra.FixedCompletions([]string{"cistern", "pytorch"},
		cobra.ShellCompDirectiveNoFileComp))
	return c
}

// writerFor chooses the format by name, or by the ending of the output where none is given.
func writerFor(to, out string) (func(io.Writer, *trace.File) error, error) {
	var names, endings []string
	for _, f := range formats {
		if f.name == to || to == "" && slices.Contains(f.endings, strings.ToLower(filepath.Ext(out))) {
			return f.write, nil
		}
		names = append(names, f.name)
		endings = append(endings, f.endings...)
	}
	if to != "" {
		return nil, fmt.Errorf("--to %q: want %s", to, strings.Join(names, " or "))
	}
	return nil, fmt.Errorf("%s: its ending says no format: want %s, or --to %s", displayOutput(out),
		strings.Join(endings, ", "), strings.Join(names, " or --to "))
}

func displayOutput(path string) string {
	if path == "-" {
		return "standard output"
	}
	return path
}
