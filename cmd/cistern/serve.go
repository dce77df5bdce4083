package main

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/internal/units"
)

// serveFlags are what `cistern serve` was asked for.
type serveFlags struct {
	socket, policy, log string
	metrics             string
	dryRun, debug       bool
	replace             bool
	objects             int
	objectMemory        string
	objectBytes         uint64 // objectMemory, 0 for the default
}

func newServe(a *app) *cobra.Command {
	var f serveFlags
	c := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Run the node's broker: move unused GPU memory to the process that needs it",
		Long: "Serve runs the broker of a node until it is stopped. Processes on Cistern connect to it, on all GPUs. When a request of one\n" +
			"would fail, the broker asks others to release memory that they cache and do not use. It never takes memory in use. It opens\n" +
			"no GPU before the first named object is built. Without it processes work as before; with CISTERN_CONF=node:off one does not connect.\n\n" +
			"As root it serves all users, at /run/cistern/node.sock, else its own, at $XDG_RUNTIME_DIR/cistern/node.sock. The policy's file\n" +
			"is read again when it changes, and on SIGHUP.",
		Example: "  cistern serve\n" +
			"  cistern serve --metrics 9470\n" +
			"  cistern serve --policy /etc/cistern/node.conf\n" +
			"  cistern serve --dry-run --debug",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			return a.serve(c.Context(), &f)
		},
	}
	c.Flags().StringVar(&f.socket, "socket", "", "listen at this `path` (default as above, or the socket that systemd passes)")
	c.Flags().BoolVar(&f.replace, "replace", false, "take over from the broker that runs, with its named objects; without one, start")
	c.Flags().StringVar(&f.policy, "policy", "", "limits, weights and priorities of clients from this `file`")
	c.Flags().StringVar(&f.metrics, "metrics", "", "serve metrics for Prometheus at this `address`: PORT for this machine only, or HOST:PORT")
	c.Flags().IntVar(&f.objects, "objects", 1024, "keep at most this `number` of named objects; a user may have a quarter of them, root and the broker's user all")
	c.Flags().StringVar(&f.objectMemory, "object-memory", "", "keep at most this `size` of named objects on a GPU (default nine tenths of its memory)")
	c.Flags().BoolVar(&f.dryRun, "dry-run", false, "decide and log, and ask no process for memory")
	c.Flags().BoolVar(&f.debug, "debug", false, "log also what goes well: clients that come and go, questions and answers")
	c.Flags().StringVar(&f.log, "log", "text", "log to standard error as `format`: text or json")
	_ = c.RegisterFlagCompletionFunc("log", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func (f *serveFlags) check() error {
	switch {
	case f.log != "text" && f.log != "json":
		return fmt.Errorf("--log %q: choose text or json", f.log)
	case f.socket != "" && !filepath.IsAbs(f.socket):
		return fmt.Errorf("--socket %s: expected an absolute path", f.socket)
	case f.objects < 1 || f.objects > mostObjects:
		return fmt.Errorf("--objects %d: expected 1 to %d", f.objects, mostObjects)
	}
	if f.objectMemory != "" {
		n, err := units.ParseBytes(f.objectMemory)
		if err != nil || n == 0 {
			return fmt.Errorf("--object-memory %s: expected a size, such as 40GiB", f.objectMemory)
		}
		f.objectBytes = n
	}
	return nil
}

// mostObjects is for how many named objects a broker has descriptors.
const mostObjects = 10_000

// logger is where the broker logs.
func (a *app) logger(f *serveFlags) *slog.Logger {
	o := &slog.HandlerOptions{}
	if f.debug {
		o.Level = slog.LevelDebug
	}
	if f.log == "json" {
		return slog.New(slog.NewJSONHandler(a.err, o))
	}
	return slog.New(slog.NewTextHandler(a.err, o))
}

// defaultSocket is where a broker of this user listens.
func defaultSocket(root bool) (string, error) {
	if root {
		return "/run/cistern/node.sock", nil
	}
	run := environ.Get("XDG_RUNTIME_DIR")
	if !filepath.IsAbs(run) {
		return "", errors.New("XDG_RUNTIME_DIR names no folder for the socket: use --socket")
	}
	return filepath.Join(run, "cistern", "node.sock"), nil
}

// mostSocket is how long the path of a socket may be: sun_path with a final 0.
const mostSocket = 107

func checkSocket(path string) error {
	if len(path) > mostSocket || strings.ContainsRune(path, 0) {
		return fmt.Errorf("%s: the path of a socket has at most %d bytes", path, mostSocket)
	}
	return nil
}
