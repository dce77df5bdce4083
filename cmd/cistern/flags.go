package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// flagNames lists a command's flags for a message.
func flagNames(c *cobra.Command) string {
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, "--"+f.Name)
		}
	})
	return strings.Join(names, ", ")
}

// sizeFlag is a limit in bytes, as people write it, or the word unlimited.
type sizeFlag struct {
	bytes     uint64 // 0: not given, or unlimited
	unlimited bool
}

func (s *sizeFlag) String() string {
	switch {
	case s.unlimited:
		return "unlimited"
	case s.bytes == 0:
		return ""
	}
	return strings.ReplaceAll(units.FormatBytes(s.bytes), " ", "")
}

func (s *sizeFlag) Set(v string) error {
	if v == "unlimited" {
		*s = sizeFlag{unlimited: true}
		return nil
	}
	n, err := units.ParseBytes(v)
	if err != nil {
		return fmt.Errorf("%w, or unlimited", err)
	}
	if n == 0 {
		return fmt.Errorf("%q: want more than 0 bytes, or unlimited", v)
	}
	*s = sizeFlag{bytes: n}
	return nil
}

func (s *sizeFlag) Type() string { return "size" }

// deviceFlag is a device's memory in bytes; 0: not given.
type deviceFlag uint64

func (d *deviceFlag) String() string {
	if *d == 0 {
		return ""
	}
	return strings.ReplaceAll(units.FormatBytes(uint64(*d)), " ", "")
}

func (d *deviceFlag) Set(v string) error {
	n, err := units.ParseBytes(v)
	if err == nil && (n < 64<<20 || n > 1<<50) {
		err = fmt.Errorf("%q: want a device's memory, such as 24GiB", v)
	}
	*d = deviceFlag(n)
	return err
}

func (d *deviceFlag) Type() string { return "size" }

// lagFlag is a time, 0 or more.
type lagFlag struct{ d time.Duration }

func (l *lagFlag) String() string { return l.d.String() }

func (l *lagFlag) Set(v string) error {
	d, err := time.ParseDuration(v)
	if err != nil || d < 0 {
		return errors.New("want a time of 0 or more with its unit, such as 20ms or 0s")
	}
	l.d = d
	return nil
}

func (l *lagFlag) Type() string { return "duration" }

// replayFlags say how a replay is run.
type replayFlags struct {
	policies []string
	capacity sizeFlag
	device   deviceFlag
	lag      lagFlag

	specs []replay.Spec
}

// defaultPolicies are replayed where no --policy is given.
var defaultPolicies = []string{"torch", "cistern"}

func (f *replayFlags) add(c *cobra.Command) {
	c.Flags().StringArrayVar(&f.policies, "policy", nil,
		"policy to replay, `NAME[:CONF]`; repeatable (default torch and cistern).\nNAME is "+
			strings.Join(replay.PolicyNames(), ", ")+
			".\nCONF replaces the trace's settings, in PYTORCH_ALLOC_CONF or CISTERN_CONF syntax; torch:default is PyTorch's defaults")
	f.addLimits(c)
	c.Flags().Var(&f.device, "device-memory", "memory of the GPU that Cistern is replayed on, such as 24GiB (default an H200's,\n"+
		"or what the trace's process said)")
	_ = c.RegisterFlagCompletionFunc("policy", cobra.FixedCompletions(replay.PolicyNames(),
		cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace))
}

func (f *replayFlags) addLimits(c *cobra.Command) {
	c.Flags().Var(&f.capacity, "capacity", "limit on the bytes reserved, such as 80GiB, or unlimited "+
		"(default the limit that explains the trace's own out-of-memory, else none)")
	f.lag.d = 20 * time.Millisecond
	c.Flags().Var(&f.lag, "gpu-lag", "how long after it was queued the simulated GPU "+
		"completes work")
}

// parse checks what the flags say before any file is read.
func (f *replayFlags) parse() error {
	named := f.policies
	if len(named) == 0 {
		named = defaultPolicies
	}
	for _, s := range named {
		spec, err := replay.ParseSpec(s)
		if err != nil {
			return fmt.Errorf("--policy: %w", err)
		}
		// Replayed over nothing, a policy fails if its settings are wrong.
		if _, err := replay.Run(&recording.Trace{Pools: []recording.PoolID{{}}}, spec, replay.Options{}); err != nil {
			return fmt.Errorf("--policy %s: %w", s, err)
		}
		if slices.Contains(f.specs, spec) {
			return fmt.Errorf("--policy %s: named twice", s)
		}
		f.specs = append(f.specs, spec)
	}
	return nil
}

func (f *replayFlags) options() replay.Options {
	return replay.Options{Capacity: f.capacity.bytes, Unlimited: f.capacity.unlimited, GPULag: f.lag.d,
		Device: uint64(f.device)}
}

// formatFlags choose between text and JSON.
type formatFlags struct{ json, ndjson bool }

func (f *formatFlags) add(c *cobra.Command) {
	c.Flags().BoolVar(&f.json, "json", false, "print one JSON object")
	c.Flags().BoolVar(&f.ndjson, "ndjson", false, "print one line of JSON for each trace")
}

func (f *formatFlags) check() error {
	if f.json && f.ndjson {
		return errors.New("--json and --ndjson: choose one")
	}
	return nil
}

// needOutput checks that -o was given.
func needOutput(c *cobra.Command, path string) error {
	if path == "" {
		return fmt.Errorf("%s: no output named: give -o FILE, or -o - for standard output", c.Name())
	}
	return nil
}
