package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	allocator "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/internal/units"
)

// attributionFlags are those of run that have the program's memory watched: each is a setting of CISTERN_CONF.
type attributionFlags struct {
	history     int
	stacks      stackKinds
	sample      string
	report      string
	reportChild bool
}

// usualSample is the default of stack_sample: what is smaller adds little to what is held.
const usualSample = "64KiB"

func (f *attributionFlags) add(c *cobra.Command) {
	c.Flags().IntVar(&f.history, "history", 0, "keep the last `N` events of each device, for snapshots, traces and reports (setting history)")
	addStacks(c, &f.stacks, "keep where requests come from, `kinds` of frames (setting stacks)", stackWords...)
	c.Flags().StringVar(&f.sample, "stack-sample", "", "of requests below `SIZE` only some get a stack, in proportion to their size; "+sizesHelp+"\n"+
		"0: all get one (default "+usualSample+"; setting stack_sample)")
	c.Flags().StringVar(&f.report, "report", "", "write a file into the `folder` for each out-of-memory, for cistern report: the first four of a process\n"+
		"and its newest; it is made where it is not there, and the last 1,000,000 events are kept where no history is given (setting report)")
	c.Flags().BoolVar(&f.reportChild, "report-child", false, "with --report: also start cistern report on each file that stays (setting report_child)")
	_ = c.MarkFlagDirname("report")
}

// merge adds the flags to settings. A flag and a setting that differ are an error, as either may be meant.
func (f *attributionFlags) merge(c *cobra.Command, conf string) (string, error) {
	s := settings(conf)
	given := c.Flags().Changed
	for _, flag := range []struct {
		name, key string
		value     func() (string, error)
	}{
		{"history", "history", func() (string, error) { return strconv.Itoa(f.history), nil }},
		{"stacks", "stacks", func() (string, error) { return string(f.stacks), nil }},
		{"stack-sample", "stack_sample", func() (string, error) { return f.sample, nil }},
		{"report", "report", f.folder},
		{"report-child", "report_child", func() (string, error) { return strconv.FormatBool(f.reportChild), nil }},
	} {
		if !given(flag.name) {
			continue
		}
		value, err := flag.value()
		if err == nil && strings.Contains(value, ",") {
			err = fmt.Errorf("%s: a setting ends at a comma", value)
		}
		if err == nil {
			_, err = allocator.ParseOptions(flag.key + ":" + value + companion[flag.key])
		}
		if err != nil {
			return "", fmt.Errorf("--%s: %w", flag.name, err)
		}
		if there, ok := s.get(flag.key); ok && !same(flag.key, there, value) {
			return "", fmt.Errorf("--%s %s: the settings say %s:%s already: give one of them", flag.name, value, flag.key, there)
		} else if !ok {
			s.add(flag.key, value)
		}
	}
	if stacks, _ := s.get("stacks"); given("stacks") && stacks != allocator.StacksOff && !s.has("stack_sample") {
		s.add("stack_sample", usualSample)
	}
	return string(s), nil
}

// companion is what a setting needs beside it to be good, so that each flag is checked for itself.
var companion = map[string]string{"stack_sample": ",stacks:native", "report_child": ",report:."}

// same reports whether two values of a setting mean the same.
func same(key, a, b string) bool {
	if key == "stack_sample" {
		x, errx := units.ParseBytes(a)
		y, erry := units.ParseBytes(b)
		return errx == nil && erry == nil && x == y
	}
	return a == b
}

// folder makes the report's folder where it is not there, and finds out now, not after hours, whether files can be made in
// it. The program may go to another folder: the path is made absolute.
func (f *attributionFlags) folder() (string, error) {
	if f.report == "" {
		return "", errors.New("expected a folder")
	}
	if strings.Contains(f.report, ",") {
		return filepath.Abs(f.report) // which is refused before a folder is made
	}
	return fleetFolder(f.report)
}

// settings are in CISTERN_CONF's syntax, "key:value,key:value".
type settings string

func (s settings) get(key string) (value string, ok bool) {
	for item := range strings.SplitSeq(string(s), ",") {
		if k, v, found := strings.Cut(strings.TrimSpace(item), ":"); found && k == key {
			value, ok = v, true // the last counts
		}
	}
	return value, ok
}

func (s settings) has(key string) bool {
	_, ok := s.get(key)
	return ok
}

func (s *settings) add(key, value string) {
	if strings.TrimSpace(string(*s)) != "" {
		*s += ","
	}
	*s += settings(key + ":" + value)
}
