package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/internal/suggest"
	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording"
	"github.com/cistern-gpu/cistern/replay"
)

// flagNames are a command's flags.
func flagNames(c *cobra.Command) []string {
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	return names
}

// leastCapacity is the smallest limit under which a replay can allocate anything: the granularity of the simulated
// driver, from which every policy takes its memory.
const leastCapacity = sim.DefaultGranularity

// sizesHelp says how flags read sizes.
const sizesHelp = "G and GiB are 2^30 bytes, GB is 10^9"

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
	if n < leastCapacity {
		return fmt.Errorf("less than one allocation of the driver: expected %d MiB or more, such as 24G, or unlimited", leastCapacity>>20)
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
		err = errors.New("expected a device's memory, such as 24G or 24GiB")
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
		return errors.New("expected a time of 0 or more with its unit, such as 20ms or 0s")
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
		"allocator to replay, with settings; may be repeated (default torch and cistern).\n`NAME[:CONF]`: NAME is "+
			strings.Join(replay.PolicyNames(), ", ")+
			".\nCONF replaces the recorded settings, as in PYTORCH_ALLOC_CONF or CISTERN_CONF; torch:default: PyTorch's defaults")
	f.addLimits(c)
	c.Flags().Var(&f.device, "device-memory", "memory of the simulated GPU for Cistern, such as 24G (default as recorded, else an H200's)")
	_ = c.RegisterFlagCompletionFunc("policy", cobra.FixedCompletions(replay.PolicyNames(),
		cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace))
}

func (f *replayFlags) addLimits(c *cobra.Command) {
	c.Flags().Var(&f.capacity, "capacity", "memory limit, such as 80G, or unlimited; "+sizesHelp+"\n"+
		"(default: the limit at which the recorded request failed, if one did)")
	f.lag.d = 20 * time.Millisecond
	c.Flags().Var(&f.lag, "gpu-lag", "time from queueing work to its completion on the simulated GPU")
}

// parse checks what the flags say before any file is read.
func (f *replayFlags) parse() error {
	named := f.policies
	if len(named) == 0 {
		named = defaultPolicies
	}
	for _, s := range named {
		spec, err := replay.ParseSpec(s)
		if name, _, _ := strings.Cut(s, ":"); err != nil {
			if hint := suggest.Question(name, "", replay.PolicyNames()); hint != "" {
				return fmt.Errorf("--policy %s: there is no such policy: %s", s, hint)
			}
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
	c.Flags().BoolVar(&f.ndjson, "ndjson", false, "print one line of JSON for each device of a recording")
}

func (f *formatFlags) check() error {
	if f.json && f.ndjson {
		return errors.New("--json and --ndjson: choose one")
	}
	return nil
}

// flagError is what is wrong with a flag, in the form of the other messages: the flag as it was given, then the reason.
func flagError(c *cobra.Command, e error) error {
	var invalid *pflag.InvalidValueError
	var number *strconv.NumError
	var unknown *pflag.NotExistError
	switch {
	case errors.As(e, &invalid):
		reason := invalid.Unwrap()
		if errors.As(reason, &number) {
			reason = errors.New("expected a whole number")
			if invalid.GetFlag().Value.Type() == "bool" {
				reason = errors.New("expected true or false")
			}
		} else if strings.HasPrefix(reason.Error(), "time: ") {
			reason = errors.New("expected a time with its unit, such as 60s or 5m")
		}
		return fmt.Errorf("--%s %s: %w", invalid.GetFlag().Name, invalid.GetValue(), reason)
	case errors.As(e, &unknown):
		if hint := suggest.Question(unknown.GetSpecifiedName(), "--", flagNames(c)); hint != "" {
			return fmt.Errorf("%w: %s", e, hint)
		}
		return fmt.Errorf("%w: %s takes --%s", e, c.Name(), strings.Join(flagNames(c), ", --"))
	}
	return e
}

// needOutput checks that -o was given.
func needOutput(c *cobra.Command, path string) error {
	if path == "" {
		return fmt.Errorf("%s: no output named: give -o FILE, or -o - for standard output", c.Name())
	}
	return nil
}
