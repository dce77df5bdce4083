package main

import (
	"fmt"
	"maps"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/internal/node/control"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/units"
)

func newNodeStat(a *app, f *nodeFlags) *cobra.Command {
	var who string
	var asJSON bool
	c := &cobra.Command{
		Use:   "stat NAME",
		Short: "Show the generations of a named object",
		Long: "Stat shows the generations of a named object: the latest, those that readers still have open after it was replaced or removed,\n" +
			"and those that a process builds.",
		Example: "  cistern node stat weights/llama-8b\n  cistern node stat --user alice weights/llama-8b",
		Args:    oneObject,
		RunE: func(_ *cobra.Command, args []string) error {
			n, err := objectNamed(args[0], who)
			if err != nil {
				return err
			}
			conn, err := f.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			return a.objects(conn, &n, asJSON)
		},
	}
	c.Flags().StringVar(&who, "user", "", "an object of this `user`, by name or number (default: your own)")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return c
}

func newNodeRemove(f *nodeFlags) *cobra.Command {
	var who string
	var generation uint64
	c := &cobra.Command{
		Use:   "rm NAME",
		Short: "Remove a named object",
		Long: "Rm removes a named object. Processes that have it open keep it, and its memory goes when the last of them has closed it. Root and\n" +
			"the broker's user remove objects of all users.",
		Example: "  cistern node rm weights/llama-8b\n  cistern node rm --user alice --generation 7 weights/llama-8b",
		Args:    oneObject,
		RunE: func(_ *cobra.Command, args []string) error {
			n, err := objectNamed(args[0], who)
			if err != nil {
				return err
			}
			conn, err := f.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			return conn.Remove(n, generation)
		},
	}
	c.Flags().StringVar(&who, "user", "", "an object of this `user`, by name or number (default: your own)")
	c.Flags().Uint64Var(&generation, "generation", 0, "remove the generation with this `number`, which may still be built, and no other")
	return c
}

func oneObject(c *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s: expected the name of one object, as weights/llama-8b", c.Name())
	}
	return nil
}

// objectNamed is an object of a user, by name or number; "" is this one.
func objectNamed(name, who string) (protocol.ObjectName, error) {
	n := protocol.ObjectName{UID: uint32(max(os.Geteuid(), 0)), Name: name}
	if who == "" {
		return n, nil
	}
	id, err := strconv.ParseUint(who, 10, 32)
	if err != nil {
		u, err := user.Lookup(who)
		if err != nil {
			return n, fmt.Errorf("--user %s: there is no such user", who)
		}
		if id, err = strconv.ParseUint(u.Uid, 10, 32); err != nil {
			return n, fmt.Errorf("--user %s: its number is %q", who, u.Uid)
		}
	}
	n.UID = uint32(id)
	return n, nil
}

// objects prints objects.
func (a *app) objects(conn *control.Conn, name *protocol.ObjectName, asJSON bool) error {
	all, err := conn.Objects(name)
	if err != nil {
		return err
	}
	if name != nil && len(all) == 0 {
		return fmt.Errorf("user %d has no object %q that you may read", name.UID, name.Name)
	}
	if asJSON {
		_ = writeJSON(a.out, struct {
			Objects []protocol.Object `json:"objects"`
		}{append([]protocol.Object{}, all...)}, true) // checkedWriter remembers
		return nil
	}
	if len(all) == 0 {
		fmt.Fprintln(a.out, "there are no objects")
		return nil
	}
	rows := [][]string{{"NAME", "GENERATION", "STATE", "SIZE", "READERS", "USER", "MODE", "TTL", "LABELS", "GPU"}}
	for _, o := range all {
		ttl := "-"
		if o.TTL != 0 {
			ttl = (time.Duration(o.TTL * float64(time.Second))).String()
		}
		var labels []string
		for _, k := range slices.Sorted(maps.Keys(o.Labels)) {
			labels = append(labels, k+"="+o.Labels[k])
		}
		rows = append(rows, []string{oneLine(o.Name), fmt.Sprint(o.Generation), oneLine(o.State), units.FormatBytes(o.Bytes), fmt.Sprint(o.Readers),
			userName(o.UID), fmt.Sprintf("%04o", o.Mode), ttl, oneLine(strings.Join(labels, " ")), oneLine(o.Device)})
	}
	a.columns(rows)
	return nil
}

// userName is a user's name, or number.
func userName(uid uint32) string {
	if u, err := user.LookupId(fmt.Sprint(uid)); err == nil {
		return oneLine(u.Username)
	}
	return fmt.Sprint(uid)
}
