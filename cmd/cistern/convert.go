package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/export"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/recording/native"
	"github.com/cistern-gpu/cistern/recording/pytorch"
)

// convertOptions say what of a run is written, where a format asks.
type convertOptions struct {
	moment export.Moment
	table  *export.Table
}

// format is one that convert writes.
type format struct {
	name    string // as --to takes it
	endings []string
	what    string
	write   func(w io.Writer, f *recording.File, o convertOptions) error
}

var formats = []format{
	{"cistern", []string{".cistern"}, "Cistern's compact format, without loss",
		func(w io.Writer, f *recording.File, _ convertOptions) error { return native.Write(w, f) }},
	{"pytorch", []string{".pickle", ".pkl"}, "a PyTorch memory snapshot, which PyTorch's viewer opens",
		func(w io.Writer, f *recording.File, _ convertOptions) error { return pytorch.Write(w, f.Traces...) }},
	{"pprof", []string{".pb.gz", ".pprof"}, "a profile of one moment (--at), for go tool pprof: flame graphs of allocations",
		func(w io.Writer, f *recording.File, o convertOptions) error { return export.WritePprof(w, f, o.moment) }},
	{"perfetto", []string{".pftrace", ".perfetto-trace"}, "a timeline for ui.perfetto.dev: memory counters, driver calls, events of threads",
		func(w io.Writer, f *recording.File, _ convertOptions) error { return export.WritePerfetto(w, f) }},
	{"parquet", []string{".parquet"}, "a table (--table) for DuckDB, Spark, ClickHouse, pandas",
		func(w io.Writer, f *recording.File, o convertOptions) error {
			return export.WriteParquet(w, f, o.table)
		}},
	{"csv", []string{".csv"}, "the same table as text",
		func(w io.Writer, f *recording.File, o convertOptions) error { return export.WriteCSV(w, f, o.table) }},
}

// formatNames are what --to takes.
func formatNames() []string {
	names := make([]string, len(formats))
	for i := range formats {
		names[i] = formats[i].name
	}
	return names
}

// oneOf joins names for a message: "a, b or c".
func oneOf(names []string) string {
	n := len(names)
	if n < 2 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:n-1], ", ") + " or " + names[n-1]
}

func newConvert(a *app) *cobra.Command {
	var to, out, at, table string
	c := &cobra.Command{
		Use:   "convert [flags] TRACE -o FILE",
		Short: "Convert a recorded run for other tools: pprof, Perfetto, Parquet, CSV, PyTorch's viewer",
		Long:  convertHelp(),
		Example: "  cistern convert run.pickle -o run.pftrace                  a timeline for ui.perfetto.dev\n" +
			"  cistern convert run.pickle -o peak.pb.gz                   a profile of the peak for go tool pprof\n" +
			"  cistern convert run.pickle --table allocations -o run.csv  a table",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s: expected one trace, got %d", c.Name(), len(args))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if err := needOutput(c, out); err != nil {
				return err
			}
			format, err := formatFor(to, out)
			if err != nil {
				return err
			}
			var options convertOptions
			if c.Flags().Changed("at") && format.name != "pprof" {
				return fmt.Errorf("--at: for pprof, not for %s", format.name)
			}
			if options.moment, err = export.ParseMoment(at); err != nil {
				return fmt.Errorf("--at: %w", err)
			}
			if c.Flags().Changed("table") && format.name != "parquet" && format.name != "csv" {
				return fmt.Errorf("--table: for parquet and csv, not for %s", format.name)
			}
			if options.table, err = export.TableNamed(table); err != nil {
				return fmt.Errorf("--table %w", err)
			}
			o, err := a.openOutput(out, args)
			if err != nil {
				return err
			}
			defer o.abandon()
			bar := a.startProgress("converting", 1)
			defer bar.end()
			return eachFile(c.Context(), a, args, bar, func(f *recording.File, _ func(int, int)) (struct{}, error) {
				if a.device.given && f.Driver != nil {
					return struct{}{}, errors.New("--device: the calls of a driver trace are converted for all devices together")
				}
				if err := format.write(o, f, options); err != nil {
					if werr := o.w.Flush(); werr != nil { // the first that failed
						err = cannotWrite(displayOutput(out), werr)
					}
					return struct{}{}, err
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
	a.device.add(c)
	c.Flags().StringVar(&to, "to", "", "`format` to write: "+oneOf(formatNames())+" (default by the ending of the output)")
	c.Flags().StringVar(&at, "at", "peak", "`moment` of a pprof profile: peak (most bytes live), oom (a request failed), start, end,\n"+
		"the number of an event, or a time since the first event such as 1.5s")
	c.Flags().StringVar(&table, "table", export.Tables[0].Name, "`table` of parquet and csv: "+oneOf(export.TableNames()))
	_ = c.RegisterFlagCompletionFunc("table", cobra.FixedCompletions(export.TableNames(), cobra.ShellCompDirectiveNoFileComp))
	_ = c.RegisterFlagCompletionFunc("to", cobra.FixedCompletions(formatNames(), cobra.ShellCompDirectiveNoFileComp))
	return c
}

// convertHelp lists the formats.
func convertHelp() string {
	var b strings.Builder
	b.WriteString("Convert reads any trace and writes it in another format. Without --to, the ending of FILE says which.\n\n")
	for _, f := range formats {
		fmt.Fprintf(&b, "  %-9s %-26s %s\n", f.name, strings.Join(f.endings, " "), f.what)
	}
	b.WriteString("\ncistern help formats: what each format contains. docs/formats.md: the columns of the tables.")
	return b.String()
}

// formatFor chooses the format by name, or by the ending of the output where none is given.
func formatFor(to, out string) (format, error) {
	var endings []string
	for _, f := range formats {
		if f.name == to || to == "" && slices.ContainsFunc(f.endings, func(e string) bool {
			return strings.HasSuffix(strings.ToLower(filepath.Base(out)), e)
		}) {
			return f, nil
		}
		endings = append(endings, f.endings...)
	}
	if to != "" {
		return format{}, fmt.Errorf("--to %q: expected %s", to, oneOf(formatNames()))
	}
	return format{}, fmt.Errorf("%s: its ending names no format: expected %s, or --to with %s", displayOutput(out),
		oneOf(endings), oneOf(formatNames()))
}

func displayOutput(path string) string {
	if path == "-" {
		return "standard output"
	}
	return path
}
