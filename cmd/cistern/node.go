package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/units"
)

// nodeFlags are those of all commands about a broker.
type nodeFlags struct{ socket string }

func newNode(a *app) *cobra.Command {
	var f nodeFlags
	c := &cobra.Command{
		Use:   "node",
		Short: "Show and change the processes and named objects of the node's broker",
		Long: "Node asks the broker that cistern serve runs: ls shows its clients, set changes their limits, weights and priorities until the\n" +
			"broker ends, pause and resume move memory between the phases of a job that allows it, stat and rm are about named objects. Root and the\n" +
			"broker's user see all clients and objects, others their own and the objects that they may read.",
		Example: "  cistern node ls\n" +
			"  cistern node set user=alice max=40GiB",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.PersistentFlags().StringVar(&f.socket, "socket", "", "the broker at this `path` (default /run/cistern/node.sock, then the one in $XDG_RUNTIME_DIR)")
	c.AddCommand(newNodeList(a, &f), newNodeSet(&f), newNodePause(a, &f), newNodeResume(a, &f), newNodeStat(a, &f), newNodeRemove(&f))
	return c
}

func (f *nodeFlags) dial() (*control.Conn, error) {
	paths := nodeSockets()
	if f.socket != "" {
		paths = []string{f.socket}
	}
	if len(paths) == 0 {
		return nil, errNotLinux
	}
	return control.Dial(paths...)
}

func newNodeList(a *app, f *nodeFlags) *cobra.Command {
	var asJSON, listObjects bool
	c := &cobra.Command{
		Use:   "ls",
		Short: "List the processes that are connected to the broker, or its named objects",
		Long: "Ls lists the clients of the broker by GPU: what each has reserved and in use, what the broker may pause of that, what is\n" +
			"paused, what it keeps (floor), what it gave and got, and how often it needed again what it had just given (refaults).\n" +
			"With --objects it lists the named objects.",
		Example: "  cistern node ls\n  cistern node ls --json\n  cistern node ls --objects",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			conn, err := f.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			if listObjects {
				return a.objects(conn, nil, asJSON)
			}
			all, err := conn.List()
			if err != nil {
				return err
			}
			slices.SortStableFunc(all, func(x, y protocol.Entry) int {
				return cmp.Or(cmp.Compare(x.Device, y.Device), cmp.Compare(y.Reserved, x.Reserved))
			})
			if asJSON {
				_ = writeJSON(a.out, struct {
					Clients []protocol.Entry `json:"clients"`
				}{append([]protocol.Entry{}, all...)}, true) // checkedWriter remembers
				return nil
			}
			a.nodeTable(all)
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	c.Flags().BoolVar(&listObjects, "objects", false, "list named objects")
	return c
}

// nodeTable prints clients, a table for each GPU.
func (a *app) nodeTable(all []protocol.Entry) {
	if len(all) == 0 {
		fmt.Fprintln(a.out, "no process is connected")
		return
	}
	for len(all) > 0 {
		n := slices.IndexFunc(all, func(e protocol.Entry) bool { return e.Device != all[0].Device })
		if n < 0 {
			n = len(all)
		}
		fmt.Fprintf(a.out, "%s  %s\n", all[0].Device, units.FormatBytes(all[0].Total))
		rows := [][]string{{"PID", "NAME", "LABEL", "RESERVED", "ACTIVE", "PAUSABLE", "PAUSED", "FLOOR", "GAVE", "GOT", "REFAULTS", "POLICY"}}
		for _, e := range all[:n] {
			rows = append(rows, []string{fmt.Sprint(e.PID), oneLine(e.Name), oneLine(e.Label), units.FormatBytes(e.Reserved), units.FormatBytes(e.Active),
				units.FormatBytes(e.Pausable), units.FormatBytes(e.Paused), units.FormatBytes(e.Floor), units.FormatBytes(e.Gave), units.FormatBytes(e.Got), fmt.Sprint(e.Refaults), policyText(e)})
		}
		a.columns(rows)
		all = all[n:]
	}
}

// columns prints rows with aligned columns.
func (a *app) columns(rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, cell := range r {
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	for _, r := range rows {
		var line strings.Builder
		for i, cell := range r {
			fmt.Fprintf(&line, "%s%s  ", cell, strings.Repeat(" ", widths[i]-len([]rune(cell))))
		}
		fmt.Fprintln(a.out, strings.TrimRight(line.String(), " "))
	}
}

// policyText is what the policy says of a client, where that is not the default.
func policyText(e protocol.Entry) string {
	var words []string
	for _, x := range []struct {
		name  string
		bytes uint64
	}{{"min", e.Min}, {"high", e.High}, {"max", e.Max}} {
		if x.bytes != 0 {
			words = append(words, x.name+"="+strings.ReplaceAll(units.FormatBytes(x.bytes), " ", ""))
		}
	}
	if e.Weight != 1 {
		words = append(words, fmt.Sprintf("weight=%d", e.Weight))
	}
	if e.Priority != 0 {
		words = append(words, fmt.Sprintf("priority=%d", e.Priority))
	}
	if e.Decay != 0 {
		words = append(words, fmt.Sprintf("decay=%gs", e.Decay))
	}
	if e.Skipped {
		words = append(words, "does not answer")
	}
	return strings.Join(words, " ")
}

func newNodeSet(f *nodeFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "set KEY=VALUE...",
		Short: "Add a rule to the broker's policy, until it ends",
		Long: "Set adds a rule: the conditions user, cgroup, label, name and device say which clients it is for, and min, high, max, weight,\n" +
			"priority and decay what is set. It applies after the rules of the file and of earlier commands.",
		Example: "  cistern node set user=alice max=40GiB\n" +
			"  cistern node set cgroup=/system.slice/serving.service min=20GiB priority=10",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("set: expected KEY=VALUE, as user=alice max=40GiB")
			}
			for _, item := range args {
				if strings.ContainsAny(item, " \t\n") {
					return fmt.Errorf("set: %q: a value has no spaces here; write it into the policy's file", item)
				}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			conn, err := f.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			return conn.Set(strings.Join(args, " "))
		},
	}
}
